"""`fedskew table`: what it runs, prints and saves, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.recipes import SMALL

RESULTS = Path(__file__).parents[2] / "results"


def test_the_table_command_runs_prints_saves_and_documents(fedskew: Any, small: Path, tmp_path: Path) -> None:
    run = fedskew("table", str(small), "--workers", "1")
    assert run.code == 0, run.err
    for words in (
        "3 runs, 0 of them finished",
        "fewer samples, one seed",
        "run 3 of 3",
        "over FedAvg",
        "results/small-reduced.json",
    ):
        assert words in run.out
    kept = json.loads(Path("results/small-reduced.json").read_text())
    assert {"commit", "versions", "settings", "runs", "date"} <= kept.keys()
    assert "3 of them finished" in fedskew("table", str(small), "--workers", "1").out
    assert fedskew("table", "docs").code == 0
    assert "fedskew table small --scale reduced" in Path("docs/results.md").read_text()


def test_part_of_a_table_is_not_saved_as_a_finished_one(fedskew: Any, small: Path) -> None:
    run = fedskew(
        "table", str(small), "--row", "skewed", "--column", "FedAvg", "--seeds", "5", "--json", "--workers", "1"
    )
    assert [cell["seeds"] for cell in run.json()["cells"]] == [[5]]
    assert not Path("results").exists()
    assert Path("runs/tables/small/small-reduced.json").exists()


@pytest.mark.slow
def test_the_list_of_tables_has_their_cells(fedskew: Any) -> None:
    assert "fedmr-table7" in fedskew("table", "list").out
    rows = {row["name"]: row for row in fedskew("table", "list", "--json").json()["tables"]}
    assert rows["fedmr-table1"]["cells"] == {"paper": 180, "reduced": 63}


MISTAKES = [
    (["table", "fedcd-tabel4"], "did you mean 'fedcd-table4'?"),
    (["table", "fedcd-table1"], "cifar10 is not in"),
    (["table", "fedcd-table1", "--row", "CIFAR10 b=.4"], "did you mean 'CIFAR10 b=.5'?"),
    (["table", "fedcd-table1", "--column", "FedAgv"], "did you mean 'FedAvg'?"),
    (["table", "fedcd-table1", "--scale", "reducd"], "did you mean 'reduced'?"),
    (["table", "fedcd-table1", "--seeds", "a"], "whole numbers"),
    (["table", "nowhere.toml"], "cannot be read"),
    (["table", "docs"], "no finished table"),
    (["table", "fedcd-table1", "--track", "tensorbord"], "did you mean 'tensorboard'?"),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES)
def test_a_mistake_in_the_table_command_is_one_sentence(fedskew: Any, words: list[str], sentence: str) -> None:
    run = fedskew(*words)
    assert run.code == 2
    assert sentence in run.err
    assert len(run.err.strip().splitlines()) == 1


def test_a_damaged_result_is_named(fedskew: Any) -> None:
    whole = json.loads(next(RESULTS.glob("*.json")).read_text())
    Path("results").mkdir()
    Path("results/x.json").write_text("{")
    assert "results/x.json is not a finished table" in fedskew("table", "docs").err
    broken = json.dumps({**whole, "cells": [{"row": "a"}]})
    Path("results/x.json").write_text(broken)
    assert (
        "results/x.json is not a finished table: Object missing required field `column`" in fedskew("table", "docs").err
    )
    Path("results/x.json").write_text('{"cells": [], "rows": {}}')
    run = fedskew("table", "docs")
    assert (run.code, Path("docs").exists()) == (2, False)
    assert "results/x.json is not a finished table: it lacks table, scale, title, unit, tolerance," in run.err


def test_a_table_that_cannot_be_written_is_an_error(fedskew: Any, small: Path) -> None:
    Path("taken").write_text("")
    run = fedskew("table", str(small), "--results", "taken", "--workers", "1")
    assert run.code == 2
    assert "cannot be written" in run.err


def test_ctrl_c_says_how_to_resume(fedskew: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedskew.cli import tables

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "run_table", interrupted)
    run = fedskew("table", str(small), "--workers", "1")
    assert run.code == 130
    assert "stopped; resume with: the same command" in run.err


def test_missing_data_and_diverged_runs_are_explained(fedskew: Any, small: Path) -> None:
    text = SMALL.replace("[rows.skewed]", '[rows.absent]\ndata = "svhn"\npaper = [60, 70, 1, 1]\n[rows.skewed]')
    text = text.replace('"fedprox:mu=0.1"', '"fedavgm:server_lr=1e30"').replace('rows = ["skewed"]', "rows = []")
    text = text.replace('options."*" = { mu = 0.2 }\n', "").replace("options.FedProx = { mu = 0.3 }\n", "")
    small.write_text(text.replace("rounds = 1", "rounds = 3"))
    run = fedskew("table", str(small), "--row", "skewed", "--row", "absent", "--workers", "1")
    assert run.code == 0, run.err
    assert "note: svhn is not in" in run.out
    assert "absent: the data set svhn is not available" in run.out
    assert "skewed | FedProx: the run diverged in round 1" in run.out
