import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment, method_of
from fedskew.methods import REGISTRY
from fedskew.studies.compare import carry_out, summarise, write

BASE = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp", rounds=2)


def quiet(*_: Any) -> None:
    pass


def test_a_method_may_be_named_with_its_settings() -> None:
    assert method_of("fedprox:mu=0.5") == REGISTRY["fedprox"](mu=0.5)  # type: ignore[call-arg]
    assert method_of("fedcrc:epochs=1-2-3,tau=0.5") == REGISTRY["fedcrc"](epochs=(1, 2, 3), tau=0.5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="did you mean 'fedprox'"):
        method_of("fedprxo")
    with pytest.raises(UsageError, match="more than one part"):
        method_of("fedavg+fedprox")


def test_every_method_sees_the_same_clients_and_cohorts(tmp_path: Path) -> None:
    base = replace(BASE, clients_per_round=2, rounds=3)
    rows = carry_out(base, ["fedavg", "fedprox"], [0, 1], tmp_path, quiet)
    assert [(row["seed"], row["method"]) for row in rows] == [
        (0, "fedavg"),
        (0, "fedprox"),
        (1, "fedavg"),
        (1, "fedprox"),
    ]
    cohorts = [[r["cohort"] for r in row["records"]] for row in rows]
    assert cohorts[0] == cohorts[1] != cohorts[2] == cohorts[3]


def test_two_settings_of_one_method_are_two_lines(tmp_path: Path) -> None:
    rows = carry_out(BASE, ["fedprox:mu=0", "fedprox:mu=5"], [0], tmp_path, quiet)
    lines = summarise(rows, None)
    assert [(line["method"], line["seeds"]) for line in lines] == [("fedprox:mu=0", 1), ("fedprox:mu=5", 1)]
    assert lines[0]["global"] != lines[1]["global"]


def test_what_is_done_is_not_done_again_and_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    first = carry_out(BASE, ["fedavg"], [0], tmp_path, quiet)
    seen: list[int] = []
    again = carry_out(BASE, ["fedavg"], [0], tmp_path, lambda text, seed, run, record: seen.append(record.round))
    assert seen == []
    assert again[0]["digest"] == first[0]["digest"]
    with pytest.raises(UsageError, match="other settings"):
        carry_out(replace(BASE, rounds=3), ["fedavg"], [0], tmp_path, quiet)


def test_figures_are_means_and_spreads_over_seeds(tmp_path: Path) -> None:
    """Accuracies .6 and .8: mean .7, standard deviation of two .1414; a target of .7 is reached by one seed only."""

    def row(seed: int, accuracy: float) -> dict[str, Any]:
        metrics = {"global": {"accuracy": accuracy}, "clients": None, "new": None}
        record = {"round": 0, "bytes_up": {"p": 3}, "bytes_down": {"p": 4}, "metrics": metrics}
        costs = {"bytes_up": 3, "bytes_down": 4, "client_seconds": 1.0, "server_seconds": 0.5, "rounds": 1}
        what = {"method": "fedavg", "seed": seed, "accuracy": accuracy, "digest": "d"}
        return {**what, "failed": "", "metrics": metrics, "records": [record], **costs}

    rows = [row(0, 0.6), row(1, 0.8)]
    (line,) = summarise(rows, target=0.7)
    assert line["global"] == pytest.approx(0.7)
    assert line["global_std"] == pytest.approx(0.1414, abs=1e-4)
    assert line["personal"] is None
    assert line["rounds_to_target"] is None
    assert summarise(rows, target=0.5)[0]["rounds_to_target"] == 1
    write(tmp_path, BASE, rows, [line])
    assert json.loads((tmp_path / "compare.json").read_text())["methods"][0]["seeds"] == 2
    assert next(csv.DictReader((tmp_path / "compare.csv").open()))["method"] == "fedavg"


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """A learning rate of 1e30 leaves nothing finite: FedAvg fails, a client that trains alone on it does too."""
    base = replace(BASE, training=replace(BASE.training, lr=1e30))
    rows = carry_out(base, ["fedavg", "fedavgm"], [0], tmp_path, quiet)
    assert [bool(row["failed"]) for row in rows] == [True, True]
    lines = summarise(rows, target=0.5)
    assert [(line["seeds"], line["failed"], line["global"]) for line in lines] == [(0, 1, None), (0, 1, None)]
    write(tmp_path, base, rows, lines)
