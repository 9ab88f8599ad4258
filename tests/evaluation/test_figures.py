"""The vocabulary of figures: keys are stable, places exist in a real result, and text has the right unit."""

from __future__ import annotations

from typing import Any

import pytest

from fedskew.evaluation.figures import ACCURACIES, COSTS, DIAGNOSTICS, FIGURES, bytes_text, percent
from fedskew.evaluation.rounds import round_costs
from fedskew.experiment.config import Evaluation, Experiment, Holdout
from fedskew.experiment.run import Run

ASKED = Experiment(
    split="longtail:factor=10+dirichlet:alpha=0.5,clients=4",
    model="mlp:hidden=8",
    rounds=1,
    holdout=Holdout(newcomers=1),
    evaluation=Evaluation(diagnose=True),
)


@pytest.fixture(scope="module")
def run() -> Run:
    made = Run(ASKED)
    list(made)
    return made


def test_the_keys_of_tables_and_files_do_not_change() -> None:
    assert list(ACCURACIES) == ["global", "head", "middle", "tail", "ensemble", "clients", "personal", "worst", "new"]
    assert list(DIAGNOSTICS) == ["eigenvalue_spread", "head_distance"]
    assert {"rounds_to_baseline", "parameters", "round_seconds", "rounds_to_target", "bytes"} <= FIGURES.keys()


def test_every_figure_with_a_place_is_in_a_run_s_result(run: Run) -> None:
    """FedAvg has all of them but an ensemble, and a figure of the user's own."""
    absent = [figure.key for figure in FIGURES.values() if figure.place and figure.read(run.result) is None]
    assert [key for key in absent if not key.startswith("ensemble") and key != "own"] == []
    assert FIGURES["worst"].read(run.result) == run.result.metrics.clients.personal.worst_decile
    assert FIGURES["global"].read(None) is None


def test_no_two_figures_have_the_same_words() -> None:
    words = [figure.words for figure in FIGURES.values()]
    assert len(set(words)) == len(words)
    assert all(figure.key == key for key, figure in FIGURES.items())


def test_the_costs_of_the_rounds_add_up_to_the_result_s(run: Run) -> None:
    assert round_costs(run.records[0]).keys() == COSTS.keys()
    for key, figure in COSTS.items():
        assert sum(round_costs(record)[key] for record in run.records) == figure.read(run.result)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("global", None, "-"),
        ("global", 0.5, "50.00"),
        ("bytes", 999.0, "999 B"),
        ("seconds", 1.25, "1.2"),
        ("rounds_to_target", 1.5, "1.5"),
        ("rounds_to_target", 12345, "12345"),
        ("head_distance", 12345.6, "1.235e+04"),
    ],
)
def test_a_value_is_shown_in_the_figure_s_unit(key: str, value: Any, text: str) -> None:
    assert FIGURES[key].text(value) == text


def test_percent_and_bytes() -> None:
    assert (percent(0.98765), percent(None)) == ("98.77", "-")
    assert [bytes_text(n) for n in (0, 1000, 66_300_000, 5e12)] == ["0 B", "1.0 kB", "66.3 MB", "5000.0 GB"]
