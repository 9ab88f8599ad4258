"""A comparison runs every method with every seed, resumes, and summarises."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment, method_of
from fedskew.experiment.run import Run
from fedskew.methods import REGISTRY
from fedskew.studies.compare import Compared, Line, distinct, read_lines, run_methods, summarise, write
from fedskew.studies.execution import Outcome, execute
from helpers.records import a_record, a_result

BASE = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp", rounds=2)


def quiet(*_: Any) -> None:
    pass


def test_a_method_may_be_named_with_its_settings() -> None:
    assert method_of("fedprox:mu=0.5") == REGISTRY["fedprox"](mu=0.5)  # type: ignore[call-arg]
    assert method_of("fedcrc:epochs=1-2-3,tau=0.5") == REGISTRY["fedcrc"](epochs=(1, 2, 3), tau=0.5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="did you mean 'fedprox'"):
        method_of("fedprxo")
    with pytest.raises(UsageError, match="expected one method"):
        method_of("fedavg+fedprox")


def test_every_method_sees_the_same_clients_and_cohorts(tmp_path: Path) -> None:
    base = replace(BASE, clients_per_round=2, rounds=3)
    runs = run_methods(base, ["fedavg", "fedprox"], [0, 1], tmp_path, quiet)
    assert [(run.seed, run.method) for run in runs] == [
        (0, "fedavg"),
        (0, "fedprox"),
        (1, "fedavg"),
        (1, "fedprox"),
    ]
    cohorts = [[r.cohort for r in run.outcome.records] for run in runs]
    assert cohorts[0] == cohorts[1] != cohorts[2] == cohorts[3]


def test_two_settings_of_one_method_are_two_lines(tmp_path: Path) -> None:
    runs = run_methods(BASE, ["fedprox:mu=0", "fedprox:mu=5"], [0], tmp_path, quiet)
    lines = summarise(runs, None)
    assert [(line.method, line.seeds) for line in lines] == [("fedprox:mu=0", 1), ("fedprox:mu=5", 1)]
    assert lines[0].figures["global"].mean != lines[1].figures["global"].mean


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    first = run_methods(BASE, ["fedavg"], [0], tmp_path, quiet)
    seen: list[int] = []
    again = run_methods(BASE, ["fedavg"], [0], tmp_path, lambda text, seed, run, record: seen.append(record.round))
    assert seen == []
    assert again[0].outcome == first[0].outcome
    with pytest.raises(UsageError, match="other settings"):
        run_methods(replace(BASE, rounds=3), ["fedavg"], [0], tmp_path, quiet)


def test_an_interrupted_run_is_resumed_even_if_its_last_record_is_torn(tmp_path: Path) -> None:
    """Killed in round 2 while it wrote the record: round 1 stays, and the result is that of a whole run."""
    steps = iter(Run(BASE, out=tmp_path / "run", checkpoint_every=1))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    with (tmp_path / "run" / "records.jsonl").open("a") as file:
        file.write('{"round": 1, "met')
    seen: list[int] = []
    outcome = execute(BASE, tmp_path / "run", lambda run, record: seen.append(record.round))
    assert seen == [1]
    assert outcome.result.digest == execute(BASE, None).result.digest


def test_figures_are_means_and_standard_deviations_over_seeds(tmp_path: Path) -> None:
    """Accuracies .6 and .8: mean .7, standard deviation of two .1414; a target of .7 is reached by one seed only."""

    def run_of(seed: int, accuracy: float) -> Compared:
        record = a_record(0, accuracy, bytes_up={"p": 3}, bytes_down={"p": 4})
        return Compared("fedavg", seed, Outcome(a_result(accuracy, bytes_up=3, bytes_down=4), [record]))

    runs = [run_of(0, 0.6), run_of(1, 0.8)]
    (line,) = summarise(runs, target=0.7)
    assert line.figures["global"].mean == pytest.approx(0.7)
    assert line.figures["global"].std == pytest.approx(0.1414, abs=1e-4)
    assert line.figures["personal"].mean is None
    assert line.costs["rounds_to_target"] is None
    assert summarise(runs, target=0.5)[0].costs["rounds_to_target"] == 1
    write(tmp_path, BASE, runs, [line])
    assert json.loads((tmp_path / "compare.json").read_text())["methods"][0]["seeds"] == 2
    assert next(csv.DictReader((tmp_path / "compare.csv").open()))["method"] == "fedavg"


def test_a_failed_run_is_reported_and_the_others_are_run(tmp_path: Path) -> None:
    """With a learning rate of 1e30 no update is finite, so both methods lose their quorum."""
    base = replace(BASE, training=replace(BASE.training, lr=1e30))
    runs = run_methods(base, ["fedavg", "fedavgm"], [0], tmp_path, quiet)
    assert [bool(run.outcome.failed) for run in runs] == [True, True]
    lines = summarise(runs, target=0.5)
    assert [(line.seeds, line.failed, line.figures["global"].mean) for line in lines] == [(0, 1, None), (0, 1, None)]
    write(tmp_path, base, runs, lines)


def test_the_same_method_in_other_words_is_one_method() -> None:
    """`fedprox` has mu=0.01 by default."""
    assert distinct(["fedavg", "fedprox", "fedavg", "fedprox:mu=0.01", "fedprox:mu=0.5"]) == [
        "fedavg",
        "fedprox",
        "fedprox:mu=0.5",
    ]


def test_lines_are_sorted_and_differences_are_paired_by_seed() -> None:
    """FedProx less FedAvg: +10, +20 and +30 points; the mean is 20, the margin 4.303 * 10 / sqrt(3) = 24.8 points."""
    table = {"fedavg": (0.5, 0.6, 0.6), "fedprox": (0.6, 0.8, 0.9), "fedper": (None, None, None)}
    runs = [
        Compared(name, seed, Outcome(a_result(accuracy), [a_record(0, accuracy)]))
        for name, accuracies in table.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    lines = summarise(runs, None)
    assert [(line.method, line.best) for line in lines] == [
        ("fedprox", True),
        ("fedavg", False),
        ("fedper", False),
    ]
    assert lines[0].over_baseline == pytest.approx(0.2)
    assert lines[0].over_baseline_margin == pytest.approx(0.248, abs=1e-3)
    assert lines[1].over_baseline is lines[2].over_baseline is None


def a_comparison() -> list[Compared]:
    """FedAvg with two seeds; FedProx with two seeds of which one failed."""
    outcomes = {"fedavg": ((0.5, ""), (0.625, "")), "fedprox": ((0.75, ""), (None, "it diverged"))}
    return [
        Compared(name, seed, Outcome(a_result(accuracy, bytes_up=3, bytes_down=4), [a_record(0, accuracy)], failed))
        for name, every in outcomes.items()
        for seed, (accuracy, failed) in enumerate(every)
    ]


@pytest.mark.parametrize("target", [0.625, None])
def test_a_comparison_is_written_as_it_was_before_its_lines_had_types(target: float | None, tmp_path: Path) -> None:
    """saved/ holds what the version with plain dicts wrote about the same runs: the same text, and it is read."""
    saved = Path(__file__).parent / "saved" / ("compare" if target is None else "compare-target")
    lines = summarise(a_comparison(), target)
    write(tmp_path, BASE, a_comparison(), lines)
    assert (tmp_path / "compare.csv").read_bytes() == (saved / "compare.csv").read_bytes()
    now, before = (json.loads((folder / "compare.json").read_text()) for folder in (tmp_path, saved))
    assert list(now) == list(before)
    assert [list(line.items()) for line in now["methods"]] == [list(line.items()) for line in before["methods"]]
    assert read_lines(saved) == lines
    assert all(isinstance(line, Line) for line in lines)
    assert ("rounds_to_target" in lines[0].costs) == (target is not None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"methods": [1]}', '{"methods": [{"method": "fedavg"}]}', '{"methods": {"seeds": 1}}']
)
def test_a_damaged_comparison_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(UsageError, match=r"compare\.json cannot be read"):
        read_lines(tmp_path)


def test_a_figure_of_another_type_is_not_read(tmp_path: Path) -> None:
    lines = summarise(a_comparison(), None)
    write(tmp_path, BASE, [], lines)
    path = tmp_path / "compare.json"
    path.write_text(path.read_text().replace('"global": 0.75', '"global": "high"'))
    with pytest.raises(UsageError, match=r"cannot be read: Expected `float \| null`, got `str`"):
        read_lines(tmp_path)
