"""A whole race on small data: it keeps its budget, looks at no test sample, survives what users bring, and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedskew
from fedskew.core.settings import UsageError
from fedskew.data.sources.loading import load
from fedskew.experiment.config import read_toml
from fedskew.experiment.progress import PROGRESS, StudyProgress
from fedskew.experiment.run_directory import find_runs, read_settings
from fedskew.studies.advise import advising, finals, race, shortlist
from fedskew.studies.advise.budget import Budget
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.profile import Profile
from fedskew.studies.advise.remarks import no_better_than_guessing, unsettled, warnings
from fedskew.studies.advise.scoring import Candidate, Score, Scorer
from fedskew.studies.advise.verdict import decide

SMALL = fedskew.Experiment(
    split="sample:keep=400+dirichlet:alpha=0.3,clients=5", model="mlp:hidden=16", rounds=3, step="fast"
)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Rungs of one round and three, two learning rates, two methods that always run, one leader in the final."""
    patch.setattr(race, "GRACE", 1)
    patch.setattr(race, "rates_around", lambda lr: [lr, lr, 3 * lr])
    for module in (race, shortlist):
        patch.setattr(module, "ALWAYS", ("fedavg", "local"))
    patch.setattr(finals, "LEADERS", 1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def advice(experiment: fedskew.Experiment = SMALL, **more: Any) -> fedskew.Advice:
    given: dict[str, Any] = {"methods": ("finetune",), "budget_rounds": 10_000, "seeds": (0, 1, 2), "device": "cpu"}
    return fedskew.advise(experiment, **given | more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[fedskew.Advice, Path]]:
    """One race to its end, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        folder = tmp_path_factory.mktemp("whole")
        yield advice(out=folder), folder


@pytest.mark.slow
def test_the_race_looks_at_validation_data_alone(whole: tuple[fedskew.Advice, Path]) -> None:
    runs = [read_settings(path) for path in find_runs([whole[1]])]
    assert len(runs) > 15
    assert {run.evaluation.part for run in runs} == {"validation"}
    assert {run.holdout.validation for run in runs} == {0.2}
    assert {run.seed for run in runs} == {0, 1, 2, 1000, 1001}


@pytest.mark.slow
def test_a_race_leaves_what_every_candidate_scored_for_the_live_page(whole: tuple[fedskew.Advice, Path]) -> None:
    """Of a candidate and a seed, the score after the most rounds."""
    kept = msgspec.json.decode((whole[1] / PROGRESS).read_bytes(), type=StudyProgress)
    assert (kept.kind, kept.finished, kept.figure) == ("advise", True, whole[0].goal)
    finals = [step for step in kept.steps if step.part == "seed 0"]
    assert {step.method for step in finals} == {f"{final.method} lr={final.lr:g}" for final in whole[0].finals}
    assert {step.rounds for step in finals} == {SMALL.rounds}


@pytest.mark.slow
def test_scrambled_test_figures_and_test_labels_do_not_change_the_choice(
    whole: tuple[fedskew.Advice, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's test labels are scrambled, the clients' test figures reversed: numbers change, the choice stays."""
    real = finals.on_test
    monkeypatch.setattr(finals, "on_test", lambda *args: 1 - (real(*args) or 0.0))
    data = load("digits")
    scrambled = replace(data, y_test=np.roll(data.y_test, 7))
    other = advice(replace(SMALL, data=scrambled))
    same = whole[0]
    assert (other.choice, other.lr, other.certain, other.ties) == (same.choice, same.lr, same.certain, same.ties)
    assert other.race == same.race
    assert [f.validation for f in other.finals] == [f.validation for f in same.finals]
    assert [f.test for f in other.finals] != [f.test for f in same.finals]


@pytest.mark.slow
def test_the_answer_is_written_and_its_command_runs(whole: tuple[fedskew.Advice, Path], fedskew: Any) -> None:
    found, folder = whole
    saved = msgspec.json.decode((folder / "advise.json").read_bytes())
    assert saved["sentence"] == found.sentence
    assert saved["command"] == found.command == f"fedskew run --config {folder}/chosen.toml"
    chosen = read_toml(folder / "chosen.toml")
    assert chosen["training"]["lr"] == found.lr
    assert chosen["holdout"]["validation"] == 0.0  # the chosen run trains on these samples, too
    done = fedskew(*found.command.split()[1:], "--json")
    assert done.code == 0, done.err
    assert done.json()["method"] == found.choice.partition(":")[0]


@pytest.mark.slow
def test_own_and_global_models_are_two_questions(whole: tuple[fedskew.Advice, Path]) -> None:
    """On skewed clients fine-tuning is far ahead, and its global model is FedAvg's, which the answer says apart."""
    found, _ = whole
    rows = {row.method: row for row in found.finals}
    assert found.goal.startswith("personal")
    assert rows["local"].shared is None
    assert rows["fedavg"].shared == rows["fedavg"].validation  # its clients use the global model
    assert rows["finetune"].validation != rows["finetune"].shared
    assert found.best_global.startswith("One model for all clients: none is told apart from tuned FedAvg's")


@pytest.mark.slow
def test_an_interrupted_race_continues_to_the_same_answer(whole: tuple[fedskew.Advice, Path], tmp_path: Path) -> None:
    rounds = 0

    def stop(progress: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds % 25 == 0:
            raise KeyboardInterrupt

    for _ in range(50):
        try:
            found = advice(out=tmp_path, watch=stop)
            break
        except KeyboardInterrupt:
            continue
    same = whole[0]
    assert rounds > 25
    assert found.sentence == same.sentence
    assert found.race == same.race
    assert found.finals == same.finals
    assert found.spent == same.spent  # nothing was trained twice
    with pytest.raises(UsageError, match="other settings"):
        advice(out=tmp_path, seeds=(0, 1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [4, 20, 60])
def test_a_budget_in_rounds_is_kept_and_too_small_a_one_gives_no_answer(budget: int, tmp_path: Path) -> None:
    found = advice(budget_rounds=budget, out=tmp_path)
    assert trained_rounds(tmp_path) <= budget
    if budget < 60:
        assert found.choice == "fedavg"
        assert found.sentence.startswith("There is no answer: the budget was")


def test_a_budget_that_is_not_enough_for_fedavg_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the budget is too small.* About 315 rounds should be enough"):
        advice(replace(SMALL, rounds=20), budget_rounds=1, out=tmp_path)
    assert trained_rounds(tmp_path) == 1


def test_data_are_loaded_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*given: Any) -> Any:
        raise AssertionError("a run loads the data again")

    monkeypatch.setattr("fedskew.experiment.assemble.load", again)
    advice(budget_rounds=4, out=tmp_path)


def test_time_before_the_call_counts_if_its_beginning_is_given(tmp_path: Path) -> None:
    """The clock stands at 100 s, the budget began at 30 s: a minute is over, and no round is trained."""
    with pytest.raises(UsageError, match="the budget is too small"):
        advice(budget_rounds=None, minutes=1, clock=lambda: 100.0, began=30.0, out=tmp_path)
    assert trained_rounds(tmp_path) == 0


def trained_rounds(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("records.jsonl"))


@pytest.mark.slow
def test_a_budget_in_minutes_is_kept_to_the_round(tmp_path: Path) -> None:
    """A clock on which each look takes a second: two minutes are 120 looks, and a run stops at the next round."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    found = advice(budget_rounds=None, minutes=2, clock=clock, out=tmp_path)
    spent = msgspec.json.decode((tmp_path / "state.json").read_bytes())["spent"]
    assert spent <= 120 + 5
    assert found.choice == "fedavg"
    assert "no answer" in found.sentence


@pytest.mark.slow
def test_a_method_that_breaks_or_diverges_does_not_end_the_race(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\n"
        "import fedskew\n"
        "@dataclass(frozen=True)\n"
        "class Nan(fedskew.Method):\n"
        "    def objective(self, site, broadcast, state):\n"
        "        return lambda net, x, y: site.loss(net, x, y) * float('nan')\n"
        "@dataclass(frozen=True)\n"
        "class Broken(fedskew.Method):\n"
        "    def aggregate(self, site, server, updates):\n"
        "        raise ValueError('no')\n"
    )
    found = advice(methods=(f"{tmp_path}/bad.py:Nan", f"{tmp_path}/bad.py:Broken"))
    fates = {row.method.rpartition(":")[2]: row for row in found.race if "bad.py" in row.method}
    assert not fates["Nan"].kept
    assert "finite" in fates["Nan"].why
    assert fates["Broken"].why == "no"
    assert found.choice in ("fedavg", "local")


@pytest.mark.slow
def test_iid_clients_get_fedavg() -> None:
    even = replace(SMALL, split="sample:keep=400+iid:clients=5", rounds=4)
    found = advice(even, methods=("fedprox",))
    assert (found.choice, found.certain) == ("fedavg", False)
    assert "use fedavg" in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([0] * 60 + [1] * 60, id="two clients"),
        pytest.param([0] * 3 + [1] * 57 + [2] * 60, id="a client with three samples"),
    ],
)
def test_few_clients_and_tiny_ones_and_rare_classes_get_an_answer(owners: list[int]) -> None:
    """Class 3 has two samples: it is missing in validation parts, and recognised by nothing."""
    rng = np.random.default_rng(0)
    y = np.concatenate([[3, 3], rng.integers(0, 3, 118)])
    x = (rng.normal(size=(120, 6)) + np.eye(4, 6)[y] * 2).astype(np.float32)
    data = fedskew.DataSet(
        "mine", x, y, x[:0], y[:0], 4, owners_train=np.array(owners), owners=tuple(map(str, sorted(set(owners))))
    )
    found = advice(fedskew.Experiment(data=data, split="natural", model="mlp:hidden=8", rounds=3))
    assert found.goal == "personal_balanced"
    assert found.finals[0].seeds == 3
    assert found.command == ""  # the data are an object: there is nothing to name
    assert found.experiment.data is data


def test_what_clients_contribute_adds_up_to_the_figure(tmp_path: Path) -> None:
    """Pooled balanced accuracy, though clients lack classes and one has three samples."""
    experiment = replace(SMALL, split="sample:keep=120+dirichlet:alpha=0.1,clients=6,min=3", rounds=1)
    for goal in (Goal("own", "balanced"), Goal("global", "accuracy")):
        scorer = Scorer(experiment, goal, tmp_path / goal.measure, Budget(100, "rounds"), every=1)
        score = scorer.score(Candidate("finetune", 0.1), 0, 1)
        assert score.value == pytest.approx(np.mean(list(score.clients.values())))
        assert score.value == (score.own if goal.model == "own" else score.shared)


def test_clients_that_never_train_contribute_nothing(tmp_path: Path) -> None:
    """The figure is over the clients that train; a newcomer in the paired tests would be judged twice."""
    experiment = replace(SMALL, holdout=replace(SMALL.holdout, newcomers=2), rounds=1)
    scorer = Scorer(experiment, Goal("own", "accuracy"), tmp_path, Budget(100, "rounds"), every=1)
    score = scorer.score(Candidate("fedavg", 0.1), 0, 1)
    assert len(score.clients) == 3
    assert score.value == pytest.approx(np.mean(list(score.clients.values())))


def test_a_longer_score_continues_the_run_and_a_method_that_counts_rounds_starts_again(tmp_path: Path) -> None:
    scorer = Scorer(SMALL, Goal("own", "accuracy"), tmp_path, Budget(100, "rounds"), every=1)
    scorer.score(Candidate("fedavg", 0.1), 0, 1)
    assert scorer.predicted(Candidate("fedavg", 0.1), 0, 3) == 2
    longer = scorer.score(Candidate("fedavg", 0.1), 0, 3)
    assert scorer.budget.spent == 3
    fresh = Scorer(SMALL, Goal("own", "accuracy"), tmp_path / "fresh", Budget(100, "rounds"), every=1)
    assert fresh.score(Candidate("fedavg", 0.1), 0, 3).clients == longer.clients
    scorer.score(Candidate("fedproc", 0.1), 0, 1)
    assert scorer.predicted(Candidate("fedproc", 0.1), 0, 3) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minutes": 1, "budget_rounds": 5}, "exclude each other"),
        ({"minutes": 0, "budget_rounds": None}, "above 0"),
        ({"budget_rounds": 0}, "at least 1"),
        ({"seeds": (0, 1)}, "expected 3 or more"),
        ({"seeds": (0, 1, 1000)}, "those of the race"),
        ({"goal": "worst"}, "own or global"),
        ({"goal": "global:worst"}, "own or global"),
        ({"methods": ("fedproxx",)}, "did you mean 'fedprox'"),
    ],
)
def test_a_question_that_cannot_be_meant_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        advice(**given)


def test_a_class_that_the_choice_never_recognises_and_a_failed_final_run_are_warnings() -> None:
    def score(name: str, seed: int, **more: Any) -> Score:
        return Score(**{"method": name, "lr": 0.1, "seed": seed, "rounds": 3, "value": 0.5} | more)

    chosen, other = Candidate("fedprox", 0.1), Candidate("feddyn", 0.1)
    blind = {0: score("fedprox", 0), 1: score("fedprox", 1, warnings=["the global model recognised no sample of '3'"])}
    failed = {0: score("feddyn", 0, value=None, failed="the run diverged in round 2")}
    found = warnings(finals.Finals({chosen: blind, other: failed}, 2, {}), chosen)
    assert found[0] == "feddyn lr=0.1 failed with seed 0: the run diverged in round 2."
    assert found[1].startswith("the global model recognised no sample of '3' (fedprox lr=0.1, seed 1")


def test_the_plan_of_rounds_grows_with_methods_and_seeds() -> None:
    assert advising.planned_rounds(4, 30, 3) < advising.planned_rounds(8, 30, 3) < advising.planned_rounds(8, 30, 5)


@pytest.mark.parametrize(
    ("measure", "value", "learned"),
    [
        ("balanced", 0.51, False),
        ("balanced", 0.6, True),
        ("accuracy", 0.96, False),
        ("auroc", 0.5, False),
        ("loss", 9, True),
    ],
)
def test_methods_that_all_call_every_patient_healthy_are_no_answer(measure: str, value: float, learned: bool) -> None:
    """97 % of the patients are healthy: 96 % accuracy or 51 % balanced accuracy is no better than guessing."""
    values = {"fedavg": dict.fromkeys(range(5), value - 0.01), "fedprox": dict.fromkeys(range(5), value)}
    goal = Goal("global", measure)
    about = Profile(figures={}, table=[[90, 2], [7, 1]], labels=["healthy", "sick"], clients=["a", "b"], public=0)
    said = no_better_than_guessing(decide(values, goal.figure, "fedavg"), goal, about, {name: name for name in values})
    assert (said == "") == learned
    assert learned or ("No method has learned these data" in said and "class 'sick', which has 3" in said)


@pytest.mark.parametrize(("last", "rises"), [(0.52, False), (0.7, True)])
def test_whether_fedavg_has_converged_is_judged_by_all_seeds(last: float, rises: bool) -> None:
    """One seed that rises by chance is no reason, and the answer itself says so if all do."""

    def scored(seed: int, end: float) -> Score:
        curve = [(5, 0.3), (10, 0.5), (15, 0.5), (20, 0.5), (25, end)]
        return Score(method="fedavg", lr=0.1, seed=seed, rounds=25, value=end, curve=curve)

    ends = [last, 0.5 if not rises else last, 0.5 if not rises else last]
    made = finals.Finals({Candidate("fedavg", 0.1): {s: scored(s, end) for s, end in enumerate(ends)}}, 3, {})
    figures = {"total_variation": 0.5, "empty_cells": 0.5, "size_gini": 0.0, "imbalance_factor": 1.0}
    halves = [[2] * 5 + [0] * 5, [0] * 5 + [2] * 5]
    about = Profile(figures=figures, table=halves, labels=[*"abcdefghij"], clients=["0", "1"], public=0)
    assert unsettled(made, Goal("own", "accuracy"), about).startswith("Tuned FedAvg still rises") == rises
    assert unsettled(made, Goal("own", "loss"), about) == ""


def test_time_between_runs_is_part_of_the_budget(tmp_path: Path) -> None:
    """Tests and pages take time, too: what is counted is the clock, not the sum of the runs."""
    now = [0.0]
    scorer = Scorer(SMALL, Goal("own", "accuracy"), tmp_path, Budget(60, "seconds"), every=1, clock=lambda: now[0])
    now[0] = 7.0
    scorer.charge()
    now[0] = 9.0
    scorer.charge(1)
    assert scorer.budget.spent == 9.0
    counted = Scorer(
        SMALL, Goal("own", "accuracy"), tmp_path / "b", Budget(60, "rounds"), every=1, clock=lambda: now[0]
    )
    counted.charge(2)
    counted.charge()
    assert counted.budget.spent == 2


def test_advice_goes_on_only_where_everything_that_was_asked_is_the_same() -> None:
    asked: dict[str, Any] = {
        "base": SMALL,
        "limits": shortlist.Limits(),
        "goal": None,
        "seeds": (0, 1, 2),
        "methods": (),
        "budget": Budget(10, "rounds"),
        "tasks": (),
    }
    others: dict[str, Any] = {
        "base": replace(SMALL, rounds=4),
        "limits": shortlist.Limits(state=False),
        "goal": "global",
        "seeds": (0, 1, 3),
        "methods": ("fedprox",),
        "budget": Budget(10, "seconds"),
    }
    found = {advising.fingerprint(**asked | {key: value}) for key, value in others.items()}
    assert len(found | {advising.fingerprint(**asked)}) == len(others) + 1
    other_method = replace(SMALL, method=fedskew.METHODS["fedprox"](), seed=7)  # neither is asked for
    assert advising.fingerprint(**asked | {"base": other_method}) == advising.fingerprint(**asked)


def test_a_run_is_predicted_by_its_preparation_and_its_rounds(tmp_path: Path) -> None:
    """5 rounds of 2 seconds, after 3 seconds of preparation that do not grow with the rounds."""
    for unit, cost in (("seconds", 13.0), ("rounds", 5.0)):
        scorer = Scorer(SMALL, Goal("own", "accuracy"), tmp_path / unit, Budget(60, unit), every=1)
        scorer.speeds["fedavg"], scorer.preparing = 2.0, 3.0
        assert scorer.predicted(Candidate("fedavg", 0.1), 0, 5) == cost
