"""What `fedskew compare` prints, and where it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.cli.options import seed_list
from fedskew.core.settings import UsageError

FEW = ["--rounds", "1", "--workers", "1", "--split", "iid:clients=2", "--model", "mlp:hidden=4"]
LONG = "fedprox:mu=0.012345678901234567890123456789"


def test_seeds_are_numbers_and_ranges_and_count_once() -> None:
    assert seed_list("0,1,2") == seed_list("0-2") == seed_list("0, 1-2, 1") == [0, 1, 2]
    assert seed_list("0,0") == [0]
    for text in ("a", "2-0", "0-", "-1", "0-99999999999", "1.5", ""):
        with pytest.raises(UsageError, match="--seeds"):
            seed_list(text)


def test_a_run_never_counts_as_two(fedskew: Any) -> None:
    done = fedskew("compare", "fedavg", "fedavg", "fedprox", "fedprox:mu=0.01", "--seeds", "0,0", "--json", *FEW)
    assert [(line["method"], line["seeds"]) for line in done.json()["methods"]] == [
        (line["method"], 1) for line in done.json()["methods"]
    ]
    assert len(done.json()["methods"]) == 2


def test_each_comparison_has_a_folder_of_its_own_and_the_same_command_resumes_it(fedskew: Any) -> None:
    folders = [
        fedskew("compare", *methods, "--json", *FEW).json()["directory"]
        for methods in (["fedavg", "fedprox"], ["fedprox", "fedavg"], ["fedavg", "moon"])
    ]
    assert folders[0] == folders[1] != folders[2]
    assert sorted(path.name for path in Path(folders[0]).iterdir() if path.is_dir()) == ["fedavg-s0", "fedprox-s0"]
    other = fedskew("compare", "fedavg", "fedprox", "--json", *FEW, "--set", "training.lr=0.2").json()["directory"]
    assert other not in folders


def test_names_are_never_cut_and_worst_says_of_which_model(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fedskew("compare", "fedavg", LONG, "--seeds", "0-1", *FEW).out
    assert "…" not in out
    (row,) = [line for line in out.splitlines() if line.startswith("fedprox") and "│" in line]
    assert row.split("│")[0].strip() in LONG
    folded = "".join(line.split("│")[0].strip() for line in out.partition("━╇")[2].partition("mean ±")[0].splitlines())
    assert LONG in folded
    for words in ("worst tenth, personal models: ", "worst tenth, global model: ", "over fedavg", " *"):
        assert words in out
    assert re.search(r"cannot be told apart|ahead of fedavg|behind fedavg", out)
    assert "next: fedskew report runs/compare-digits-" in out


def test_a_class_that_is_never_recognised_is_a_warning(fedskew: Any) -> None:
    rng = np.random.default_rng(0)
    y = np.array(["healthy"] * 190 + ["sick"] * 10)
    np.savez("own.npz", x_train=rng.normal(size=(200, 4)).astype(np.float32), y_train=y)
    words = ["compare", "fedavg", "fedprox", "--data", "own.npz", "--split", "iid:clients=2", "--rounds", "9"]
    done = fedskew(*words, "--workers", "1")
    assert "warning: the global model recognised no sample of class 'sick' (0 of 2) (fedprox, seed 0)" in done.out
    table = done.out.partition("method ")[2]
    assert re.match(r"\s*┃ balanced accuracy", table)
    found = fedskew(*words, "--json").json()
    assert found["goal"] == "balanced"
    assert len(found["warnings"]) == 4
