"""`fedskew board`: what it runs, prints and writes, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedskew.cli import board_output
from fedskew.studies.board import tasks
from fedskew.studies.board.evidence import read_task, write_task
from helpers.boards import made_task, write_tiny


@pytest.fixture
def board(fedskew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, with one task (tiny) and two methods; the evidence goes to a folder of the test."""
    monkeypatch.setattr(tasks, "HOME", write_tiny(tmp_path / "tasks"))
    monkeypatch.setattr(board_output, "all_methods", lambda: ["fedavg", "fedprox"])
    monkeypatch.setattr(board_output, "own_evidence", lambda: tmp_path / "package")
    return lambda *words: fedskew("board", *words)


@pytest.fixture
def made(tmp_path: Path) -> str:
    """A folder of evidence that is made up: t1, and t2 where FedAvg has not converged."""
    write_task(made_task("t1"), tmp_path / "made")
    write_task(made_task("t2", curve=(0.2, 0.3, 0.4, 0.5)), tmp_path / "made")
    return str(tmp_path / "made")


def test_a_board_is_run_shown_verified_and_becomes_a_page(board: Any, tmp_path: Path) -> None:
    part = board("run", "--method", "fedavg", "--json")
    assert part.code == 0, part.err
    assert part.json()["tasks"][0]["missing"] == ["fedprox"]
    assert not (tmp_path / "package").exists(), "a part of a task does not ship"
    run = board("run")
    assert "run 8 of 8, about 0 s left: tiny fedprox finished" in run.out
    assert "the task is whole" in run.out
    task = read_task(tmp_path / "package" / "tiny.json")
    assert [row.seeds for row in task.rows] == [2, 2]
    given = ("--evidence", str(tmp_path / "package"))
    assert "digits, five clients" in board("show", *given).out
    assert "fedavg after rounds 1, 2, 3, 4" in board("show", "tiny", *given).out
    same = board("verify", "tiny/fedprox/1", *given)
    assert same.code == 0
    assert "the same, bit for bit" in same.out
    task.rows[0].digests[1] = "0" * 64
    write_task(task, tmp_path / "package")
    other = board("verify", f"tiny/{task.rows[0].method}/1", *given, "--json")
    assert other.code == 1
    assert other.json()["same"] is False
    assert board("page", *given, "--out", "board.html").code == 0
    assert "fedskew board verify tiny/fedprox/0" in Path("board.html").read_text()


def test_the_partial_option_ships_what_is_finished_and_says_so(board: Any, tmp_path: Path) -> None:
    assert board("run", "tiny", "--method", "fedavg", "--partial").code == 0
    assert read_task(tmp_path / "package" / "tiny.json").missing == ["fedprox"]


def test_a_baseline_that_has_not_converged_is_a_warning_not_a_ranking(board: Any, made: str) -> None:
    assert "warning: t2: fedavg still rises by 10.0 points" in board("show", "--evidence", made).out
    shown = board("show", "t2", "--evidence", made)
    assert "methods are not ranked there" in shown.out
    assert " =" not in shown.out.partition("= cannot")[0].replace("server sees", "")


def test_show_as_json_has_the_rows_and_the_tally(board: Any, made: str) -> None:
    found = json.loads(board("show", "--evidence", made, "--json").out)
    assert found["tally"]["fedprox"] == {"win": 1, "tie": 0, "loss": 0}
    assert [task["name"] for task in found["tasks"]] == ["t1", "t2"]


MISTAKES = [
    (("run", "tinny"), "did you mean 'tiny'?"),
    (("run", "--method", "fedagv"), "did you mean 'fedavg'?"),
    (("run", "--method", "fedprox:mu=-1"), "mu"),
    (("show", "--evidence", "nowhere"), "run `fedskew board run` first"),
    (("page", "--evidence", "nowhere"), "run `fedskew board run` first"),
    (("show", "t7", "--evidence", "made"), "unknown task with evidence 't7'"),
    (("verify", "t1", "--evidence", "made"), "expected task/method/seed"),
    (("verify", "t1/fedavg/x", "--evidence", "made"), "expected task/method/seed"),
    (("verify", "t1/fedmr/0", "--evidence", "made"), "unknown method with evidence on task t1 'fedmr'"),
    (("verify", "t1/fedavg/7", "--evidence", "made"), "finished are 0, 1, 2"),
    (("run", "--out", "made/t1.json"), "cannot be written"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], expected: str, board: Any, made: str) -> None:
    said = board(*words)
    assert said.code == 2
    assert expected in said.err
    assert "Traceback" not in said.err
    assert said.err.startswith("fedskew: ")
    assert len(said.err.strip().splitlines()) == 1
