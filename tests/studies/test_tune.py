"""Tuning is fair: the same number of trials for each method, on validation data, with no look at a test sample."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.evaluation.metrics import Metrics, Population
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Evaluation, Experiment, Holdout, from_dict, read_toml
from fedskew.methods import REGISTRY
from fedskew.methods.fedmr import FedMR
from fedskew.studies.tune import Search, criterion, declared_ranges, read_range, search, space
from helpers.records import over_clients

pytestmark = pytest.mark.slow  # dozens of small federations

BASE = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=16", rounds=2, training=Training(lr=0.1))


def plan(out: Path, **more: Any) -> Search:
    given: dict[str, Any] = {"methods": ("fedavg", "fedprox"), "budget": 3, "seeds": (0,), "out": out}
    return Search(BASE, **given | more)


def quiet(*_: Any) -> None:
    pass


def test_a_search_goes_by_factors_around_the_learning_rate_and_the_published_weights() -> None:
    assert space("fedprox", 0.1, {}) == {"lr": (pytest.approx(0.01), pytest.approx(1.0)), "method.mu": (0.001, 1.0)}
    assert set(space("fedprox:mu=0.5", 0.1, {})) == {"lr"}  # what the text sets stays
    given = {"lr": (0.2, 0.3), "fedprox.mu": (0.5, 0.6), "moon.mu": (1.0, 2.0)}
    assert space("fedprox", 0.1, given) == {"lr": (0.2, 0.3), "method.mu": (0.5, 0.6)}
    with pytest.raises(UsageError, match="did you mean 'mu'"):
        space("fedprox", 0.1, {"fedprox.mue": (0.1, 1.0)})


def test_only_settings_that_declare_a_range_are_searched() -> None:
    """SCAFFOLD declares a range for server_lr alone; FedAvg has only its learning rate searched."""
    assert declared_ranges(REGISTRY["feddyn"]) == {"alpha": (0.001, 0.3)}
    assert declared_ranges(REGISTRY["scaffold"]) == {"server_lr": (0.1, 2.0)}
    assert declared_ranges(REGISTRY["fedavg"]) == {}


def test_a_trial_has_no_test_sample_and_validates_on_samples_that_the_test_never_holds(tmp_path: Path) -> None:
    trial = plan(tmp_path).trial("fedavg", {"lr": 0.3}, 5)
    assert (trial.seed, trial.training.lr, trial.evaluation.part) == (5, 0.3, "validation")
    assert trial.evaluation.every == BASE.rounds  # only the end is judged
    tuned, final = assemble(trial).world, assemble(replace(BASE, seed=5)).world
    assert len(tuned.y_test) == len(tuned.x_test) == 0
    kept = set(final.test.values.tolist())
    assert len(kept) > 100
    assert kept.isdisjoint(tuned.test.values.tolist())
    assert kept.isdisjoint(tuned.train.values.tolist())
    assert set(tuned.test.values.tolist()) == set(tuned.validation.values.tolist())


def test_validation_without_validation_data_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"holdout\.validation"):
        assemble(replace(BASE, evaluation=Evaluation(part="validation")))
    own = replace(BASE, holdout=Holdout(validation=0.1))
    assert Search(own, ("fedavg",), 1, (0,), Path("x")).trial("fedavg", {"lr": 1.0}, 0).holdout.validation == 0.1


def test_what_is_made_large_is_the_global_model_on_all_validation_samples_or_the_personal_mean() -> None:
    shared, personal = over_clients(weighted=0.6, mean=0.1), over_clients(mean=0.9, weighted=0.2)
    metrics = Metrics(clients=Population(global_=shared, personal=personal, never_trained=0, sampled=False))
    assert criterion(metrics, "global") == 0.6
    assert criterion(metrics, "personal") == 0.9


@pytest.mark.slow  # trains for seconds
def test_every_method_gets_the_same_number_of_trials_and_the_first_is_the_method_as_it_stands(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    lines = search(plan(tmp_path), lambda text, number, value: seen.append((text, number)))
    assert seen == [(text, number) for text in ("fedavg", "fedprox") for number in (1, 2, 3)]
    assert [len(line["trials"]) for line in lines] == [3, 3]
    assert lines[1]["trials"][0]["values"] == {"lr": pytest.approx(0.1), "method.mu": pytest.approx(0.01)}
    assert len({trial["values"]["lr"] for trial in lines[1]["trials"]}) == 3
    best = max(lines[1]["trials"], key=lambda trial: trial["accuracy"])
    assert (lines[1]["accuracy"], lines[1]["values"]) == (best["accuracy"], best["values"])


def test_a_weight_without_a_value_of_its_own_starts_in_the_middle_of_its_range(tmp_path: Path) -> None:
    """FedMR's weights are those of its form, 1.4 and 0.1: the middle, by factors, of 0.1 to 20 and of 0.01 to 1."""
    (line,) = search(plan(tmp_path, methods=("fedmr",), budget=1), quiet)
    first = {"lr": 0.1, "method.mu1": pytest.approx(2**0.5), "method.mu2": pytest.approx(0.1)}
    assert line["trials"][0]["values"] == first
    assert FedMR().weights(84) == (1.4, 0.1)


def test_the_chosen_values_are_an_experiment_for_the_test_data(tmp_path: Path) -> None:
    lines = search(plan(tmp_path), quiet)
    chosen = from_dict(read_toml(Path(lines[1]["file"])))
    assert chosen.method.mu == lines[1]["values"]["method.mu"]  # type: ignore[attr-defined]
    assert chosen.training.lr == lines[1]["values"]["lr"]
    assert (chosen.holdout, chosen.evaluation, chosen.split) == (BASE.holdout, BASE.evaluation, BASE.split)
    assert json.loads((tmp_path / "tune.json").read_text())["methods"][1]["file"] == lines[1]["file"]


def test_a_trial_leaves_its_records_but_no_models(tmp_path: Path) -> None:
    search(plan(tmp_path, methods=("fedavg",), budget=1), quiet)
    trials = list((tmp_path / "trials").iterdir())
    assert trials
    for trial in trials:
        assert {"settings.toml", "records.jsonl", "result.json"} <= {path.name for path in trial.iterdir()}
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow  # trains for seconds
def test_a_search_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = search(plan(tmp_path / "whole", methods=("fedprox",)), quiet)

    def stop(text: str, number: int, value: float) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(plan(tmp_path / "cut", methods=("fedprox",)), stop)
    seen: list[int] = []
    again = search(plan(tmp_path / "cut", methods=("fedprox",)), lambda text, number, value: seen.append(number))
    assert seen == [3]
    assert again[0]["trials"] == whole[0]["trials"]


def test_a_trial_that_was_cut_off_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedskew.studies import tune

    real = tune.execute

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "execute", dies)
    with pytest.raises(KeyboardInterrupt):
        search(plan(tmp_path, methods=("fedavg",)), quiet)
    monkeypatch.setattr(tune, "execute", real)
    assert len(search(plan(tmp_path, methods=("fedavg",)), quiet)[0]["trials"]) == 3


def test_a_search_with_other_settings_is_refused(tmp_path: Path) -> None:
    search(plan(tmp_path, budget=1), quiet)
    with pytest.raises(UsageError, match="other settings"):
        search(replace(plan(tmp_path, budget=1), base=replace(BASE, rounds=1)), quiet)
    with pytest.raises(UsageError, match="other settings"):
        search(plan(tmp_path, budget=1, ranges={"lr": (0.1, 0.2)}), quiet)


def test_a_trial_that_diverges_is_spent_and_worth_nothing(tmp_path: Path) -> None:
    lines = search(plan(tmp_path, budget=1, ranges={"lr": (1e30, 1e31)}), quiet)
    assert [line["accuracy"] for line in lines] == [0.0, 0.0]


def test_a_trial_is_the_mean_over_seeds(tmp_path: Path) -> None:
    both, one, two = (
        search(plan(tmp_path / str(i), methods=("fedavg",), budget=1, seeds=seeds), quiet)[0]["accuracy"]
        for i, seeds in enumerate([(0, 1), (0,), (1,)])
    )
    assert both == pytest.approx((one + two) / 2)
    assert one != two


def test_a_method_without_a_global_model_is_tuned_by_its_personal_ones(tmp_path: Path) -> None:
    (line,) = search(plan(tmp_path, methods=("fedper",), budget=1), quiet)
    assert line["accuracy"] > 0
    with pytest.raises(UsageError, match="--goal personal"):
        search(plan(tmp_path / "2", methods=("fedper",), goal="global"), quiet)


@pytest.mark.parametrize("text", ["fedprox.mu", "fedprox.mu=1", "fedprox.mu=2:1", "fedprox.mu=0:1", "fedprox.mu=a:b"])
def test_an_invalid_range_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--range"):
        read_range(text)
    assert read_range("fedprox.mu=0.001:1") == ("fedprox.mu", (0.001, 1.0))


def test_the_tune_command_says_what_it_chose_and_what_next(fedskew: Any) -> None:
    few = ("--budget", "2", "--rounds", "1", "--model", "mlp:hidden=8", "--workers", "1", "--out", "t")
    said = fedskew("tune", "fedavg", "fedprox", *few)
    assert said.code == 0, said.err
    for words in ("fedprox trial 2 of 2", "best of 2 trials each", "lr=", "mu=", "fedskew run --config t/fedavg.toml"):
        assert words in said.out
    printed = fedskew("tune", "fedavg", "fedprox", *few, "--json").json()
    assert [line["method"] for line in printed["methods"]] == ["fedavg", "fedprox"]
    assert fedskew("run", "--config", "t/fedprox.toml", "--workers", "1", "--json").json()["accuracy"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedprxo"], "did you mean 'fedprox'"),
        (["fedavg", "--range", "fedprox.mu=0.1:1"], "unknown method of --range 'fedprox'"),
        (["fedavg", "--goal", "persnal"], "did you mean 'personal'"),
    ],
)
def test_a_mistake_in_tuning_is_one_sentence(fedskew: Any, words: list[str], sentence: str) -> None:
    said = fedskew("tune", *words, "--budget", "1", "--rounds", "1", "--workers", "1")
    assert said.code == 2
    assert sentence in said.err


def test_without_optuna_the_command_says_how_to_get_it(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'fedskew[tune]'" in fedskew("tune", "fedavg", "--budget", "1").err


def test_ctrl_c_says_how_to_resume(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedskew.cli import tuning

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "search", interrupted)
    said = fedskew("tune", "fedavg", "--budget", "1")
    assert said.code == 130
    assert "stopped; resume with: the same command" in said.err
