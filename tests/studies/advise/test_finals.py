"""The final with more seeds for an open lead: found if it is real, and no more mistakes than promised if it is not.

No training: scores are drawn from a distribution, a seed costs what the budget says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import fedskew
from fedskew.federation.simulate.simulation import Simulation
from fedskew.studies.advise.budget import Budget, BudgetUsed
from fedskew.studies.advise.finals import MOST, Finals, finalists, on_test, run_finals, seeds_after
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.promotion import Fate
from fedskew.studies.advise.race import Race, Rung
from fedskew.studies.advise.remarks import open_lead, short_sentence, too_little
from fedskew.studies.advise.scoring import Candidate, Score, Scorer, State
from fedskew.studies.advise.verdict import Verdict, decide, margins_of

FIRST = (0, 1, 2, 3, 4)
METHODS = ("fedavg", "finetune", "local", "fedprox", "scaffold", "ditto")
Draw = Callable[[str, int], float]  # (method, seed) -> what it scores


class Drawn:
    """Stands for a `Scorer`: scores are drawn, and a run costs its rounds."""

    def __init__(self, draw: Draw, limit: float) -> None:
        self.goal, self.budget, self.state = Goal("own", "accuracy"), Budget(limit, "rounds"), State(settings="")
        self.draw, self.ahead = draw, 0

    def decided(self, stage: str, decide: Callable[[], list[Candidate]]) -> list[Candidate]:
        return decide()

    def save(self) -> None:
        pass

    def seconds(self, candidate: Candidate) -> float:
        return 1.0

    def predicted(self, candidate: Candidate, seed: int, rounds: int) -> float:
        return rounds

    def score(self, candidate: Candidate, seed: int, rounds: int) -> Score:
        if self.budget.left <= 0:
            raise BudgetUsed
        self.budget.spent += rounds
        return made(candidate, seed, self.draw(candidate.name, seed))


def made(candidate: Candidate, seed: int, value: float) -> Score:
    return Score(method=candidate.method, lr=candidate.lr, seed=seed, rounds=10, value=value)


def final(draw: Draw, seeds: float, first: tuple[int, ...] = FIRST, more: bool = True) -> tuple[Verdict, Finals, Drawn]:
    """The final of six methods with a budget for so many seeds of all."""
    candidates = [Candidate(name, 0.1) for name in METHODS]
    raced = {c: [made(c, 1000, 0.5), made(c, 1001, 0.5)] for c in candidates}
    race = Race([Rung(10, [Fate(c, True, "", 0.5) for c in candidates])], raced, {})
    scorer = Drawn(draw, 10 * len(METHODS) * seeds)
    found = run_finals(cast(Scorer, scorer), race, 10, first, seeds_after(first) if more else ())
    return decide(found.values(), scorer.goal.figure, "fedavg lr=0.1"), found, scorer


def noise(seed: int, spread: float = 0.01, lead: float = 0.0, step: float = 0.0) -> Draw:
    """Normal noise, the same for all methods; fedprox has a `lead`; rounded to multiples of `step` if that is not 0."""
    rng = np.random.default_rng(seed)

    def draw(name: str, _: int) -> float:
        value = 0.8 + rng.normal(0, spread) + (lead if name == "fedprox" else 0.0)
        return round(value / step) * step if step else value

    return draw


def test_a_lead_that_the_first_seeds_leave_open_is_found_if_there_is_budget() -> None:
    """A lead of one standard deviation: five seeds show it seldom, twenty mostly."""
    few = [final(noise(i, lead=0.014), 5) for i in range(40)]
    many = [final(noise(i, lead=0.014), MOST) for i in range(40)]
    assert {len(found.seeds) for _, found, _ in few} == {5}
    shown = [sum(verdict.choice.startswith("fedprox") for verdict, _, _ in of) for of in (few, many)]
    assert shown[0] <= 12
    assert shown[1] >= 24
    assert sum(verdict.choice.partition(" ")[0] not in ("fedavg", "fedprox") for verdict, _, _ in many) <= 2


def test_three_seeds_cannot_show_what_more_do() -> None:
    draw = noise(3, lead=0.02)
    three, _, _ = final(draw, 3)
    assert not three.certain
    verdict, found, _ = final(noise(3, lead=0.02), MOST)
    assert (verdict.choice, len(found.seeds)) == ("fedprox lr=0.1", MOST)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(0.0, id="normal"), pytest.param(0.02, id="coarse")])
@pytest.mark.parametrize("seeds", [3, 5, 9, MOST])
def test_pure_noise_is_recommended_in_at_most_five_percent(seeds: int, step: float) -> None:
    """Coarse: a validation set of 50 samples, on which the differences of a few seeds often agree exactly."""
    wrong = sum(final(noise(i, step=step), seeds)[0].certain for i in range(800))
    assert wrong / 800 <= 0.05


def test_seeds_that_agree_by_chance_are_no_proof() -> None:
    """fedprox is ahead by one of 50 samples with each of three seeds; the others differ by that much, too."""
    base = {0: 0.80, 1: 0.82, 2: 0.78}
    values = {"fedavg": base, "fedprox": {s: v + 0.02 for s, v in base.items()}}
    values |= {f"m{i}": {s: v + 0.02 * ((s + i) % 3 - 1) for s, v in base.items()} for i in range(3)}
    verdict = decide(values, Goal("own", "accuracy").figure, "fedavg")
    assert (verdict.choice, verdict.certain) == ("fedavg", False)
    assert margins_of(values, "fedavg", 3)["fedprox"] == pytest.approx(8.860 * 0.5 * 0.02 / 3**0.5, rel=1e-2)


def test_budget_that_cannot_decide_anything_is_not_spent() -> None:
    """Nothing is ahead of FedAvg: more seeds would be a waste of the user's minutes."""
    behind = {"fedavg": 0.9}
    rng = np.random.default_rng(0)
    verdict, found, scorer = final(lambda name, _: behind.get(name, 0.8) + rng.normal(0, 0.001), MOST)
    assert not verdict.certain
    assert len(found.seeds) == len(FIRST)
    assert scorer.ahead == 0


def test_a_lead_that_is_told_at_once_takes_no_more_seeds() -> None:
    verdict, found, scorer = final(noise(0, spread=0.001, lead=0.1), MOST)
    assert (verdict.choice, len(found.seeds), scorer.budget.spent) == ("fedprox lr=0.1", 5, 10 * 6 * 5)


def test_seeds_that_were_given_are_all_that_run() -> None:
    for i in range(20):
        assert len(final(noise(i, lead=0.014), MOST, more=False)[1].seeds) == 5


def test_how_many_seeds_there_will_be_does_not_depend_on_the_scores() -> None:
    plans = {final(noise(i, lead=0.014), 11)[2].state.more for i in range(20)}
    assert plans == {6}


def test_an_open_lead_says_how_many_seeds_would_tell() -> None:
    found: list[list[str]] = []
    for i in range(40):
        verdict, finals, _ = final(noise(i, lead=0.014), 5)
        names = {str(c): f"{c.method} with lr {c.lr:g}" for c in finals.scores}
        found.append(open_lead(verdict, finals, Goal("own", "accuracy").figure, names))
        assert not (verdict.certain and found[-1])
    said = [notes[0] for notes in found if notes]
    assert any(s.startswith("If fedprox with lr 0.1 stays as far ahead as it is, about") for s in said)


def test_the_seeds_of_the_race_are_never_those_of_the_final() -> None:
    assert seeds_after(FIRST) == tuple(range(5, MOST))
    near: tuple[int, ...] = seeds_after((997, 998, 999))
    assert not {1000, 1001} & set(near)
    assert len(near) == MOST - 3


@pytest.mark.slow
def test_a_planted_fault_would_be_seen() -> None:
    """The simulation above is not empty: without allowing for the number of methods, mistakes are more than 5 %."""
    figure: Any = Goal("own", "accuracy").figure
    wrong = 0
    for i in range(300):
        _, found, _ = final(noise(i), 5)
        standings = decide(found.values(), figure, "fedavg lr=0.1").standings
        wrong += any(s.over is not None and s.over.certain and s.over.mean > 0 for s in standings)
    assert wrong / 300 > 0.05


def test_a_small_budget_compares_fedavg_with_the_race_s_best_and_training_alone() -> None:
    """Three seeds of three methods, where four are too many. Without training alone an answer could be below it."""
    candidates = [Candidate(name, 0.1) for name in METHODS]
    values = dict.fromkeys(METHODS, 0.5) | {"scaffold": 0.6}
    raced = {c: [made(c, seed, values[c.name]) for seed in (1000, 1001)] for c in candidates}
    scorer = Drawn(noise(0, spread=0.001), 95)
    found = run_finals(cast(Scorer, scorer), Race([], raced, {}), 10, FIRST)
    assert [c.name for c in found.scores] == ["fedavg", "local", "scaffold"]
    assert len(found.seeds) == 3


def test_training_alone_and_fine_tuning_are_in_the_final_though_the_race_left_them_behind() -> None:
    """Of the two rates that local tried in the first rung, the better one."""
    fedavg, prox = Candidate("fedavg", 0.1), Candidate("fedprox", 0.1)
    low, high = Candidate("local", 0.03), Candidate("local", 0.3)
    first = Rung(5, [Fate(c, False, "", value) for c, value in ((fedavg, 0.5), (prox, 0.5), (low, 0.4), (high, 0.6))])
    raced = {c: [made(c, 1000, 0.5), made(c, 1001, 0.5)] for c in (fedavg, prox)}
    scorer = Drawn(noise(0), 10_000)
    found = run_finals(cast(Scorer, scorer), Race([first], raced, {}), 10, FIRST)
    assert list(found.scores) == [fedavg, high, prox]


def test_too_small_a_budget_says_what_would_be_enough() -> None:
    """Three seeds of two methods, 11 rounds each with their evaluation, are 66 rounds, and 0.4 of a budget: 165."""
    _, found, scorer = final(noise(0), 0.5)
    assert len(found.seeds) < 3
    assert too_little(found, scorer.budget).startswith("About 165 rounds should be enough")
    assert too_little(final(noise(0), 5)[1], scorer.budget) == ""


def test_a_budget_for_few_rounds_gives_a_short_final_with_training_alone_that_recommends_nothing() -> None:
    """125 rounds, of which 0.8 count: nine runs (FedAvg, local and the leader, three seeds) have 11 of 30 rounds."""
    candidates = [Candidate(name, 0.1) for name in ("fedavg", "finetune", "local", "fedprox")]
    values = {"fedprox": 0.9}
    raced = {c: [made(c, seed, values.get(c.name, 0.5)) for seed in (1000, 1001)] for c in candidates}
    scorer = Drawn(lambda name, seed: values.get(name, 0.5) + seed / 1000, 125)
    found = run_finals(cast(Scorer, scorer), Race([], raced, {}), 30, FIRST, (5, 6))
    assert [c.name for c in found.scores] == ["fedavg", "local", "fedprox"]
    assert (found.rounds, found.whole, found.short, found.seeds) == (11, 30, True, [0, 1, 2])
    assert scorer.budget.spent == 99
    figure, names = scorer.goal.figure, {str(c): c.method for c in candidates}
    verdict = decide(found.values(), figure, "fedavg lr=0.1")
    assert verdict.certain
    said = short_sentence(verdict, found, figure, "fedavg lr=0.1", names, "local lr=0.1")
    assert said.startswith("There is no answer for 30 rounds: the budget was enough for finals of 11. fedprox is 40.0")
    assert "better than tuned FedAvg after 11 of 30 rounds; tuned FedAvg has 50.10 and training alone has 50.10" in said
    assert said.endswith("Until more is known use fedavg.")
    assert too_little(found, scorer.budget).startswith("About 465 rounds should be enough")


def test_finals_of_fewer_than_five_rounds_are_not_run() -> None:
    candidates = [Candidate(name, 0.1) for name in ("fedavg", "local", "fedprox")]
    raced = {c: [made(c, seed, {"fedprox": 0.9}.get(c.name, 0.5)) for seed in (1000, 1001)] for c in candidates}
    scorer = Drawn(noise(0), 55)  # 0.8 of it are 44 rounds, nine runs of four
    found = run_finals(cast(Scorer, scorer), Race([], raced, {}), 30, FIRST)
    assert (found.seeds, found.rounds, scorer.budget.spent) == ([], 30, 0)


def test_if_rounds_get_slower_three_seeds_of_the_first_go_before_all_methods() -> None:
    """180 rounds are three seeds of six methods; after the first seed the budget is cut by 50, so only three go on."""
    scorer: Drawn

    def draw(name: str, seed: int) -> float:
        scorer.budget.spent += 50 * ((name, seed) == ("ditto", 0))
        return {"fedprox": 0.9}.get(name, 0.5)

    candidates = [Candidate(name, 0.1) for name in METHODS]
    raced = {c: [made(c, s, {"fedprox": 0.9}.get(c.name, 0.5)) for s in (1000, 1001)] for c in candidates}
    scorer = Drawn(draw, 180)
    found = run_finals(cast(Scorer, scorer), Race([], raced, {}), 10, FIRST[:3])
    assert [c.name for c in found.scores] == ["fedavg", "local", "fedprox"]
    assert found.seeds == [0, 1, 2]
    assert list(found.left_out) == ["finetune lr=0.1", "scaffold lr=0.1", "ditto lr=0.1"]


def test_a_final_without_a_leader_still_has_training_alone_and_fine_tuning() -> None:
    candidates = [Candidate(name, 0.1) for name in ("fedavg", "finetune", "local")]
    raced = {c: [made(c, 1000, 0.5), made(c, 1001, 0.5)] for c in candidates}
    found = run_finals(cast(Scorer, Drawn(noise(0), 10_000)), Race([], raced, {}), 10, FIRST)
    assert list(found.scores) == candidates


# Who is in it, and on which samples its numbers are.


def finished_race(values: dict[str, tuple[float, float | None]]) -> Race:
    """A race whose methods have these values, and their global models those."""
    return Race(
        [],
        {
            Candidate(name, 0.1): [Score(method=name, lr=0.1, seed=0, rounds=5, value=value, shared=shared)]
            for name, (value, shared) in values.items()
        },
        {},
    )


VALUES = {"fedavg": (0.5, 0.5), "local": (0.4, None), "finetune": (0.6, 0.5)}


def test_the_best_global_model_is_in_the_final_in_place_of_the_third_leader() -> None:
    """fedprox, feddyn and scaffold lead; fedyogi is fourth, but has the best global model."""
    others = {"fedprox": (0.9, 0.6), "feddyn": (0.8, 0.6), "scaffold": (0.7, 0.6), "fedyogi": (0.6, 0.8)}
    found = [c.method for c in finalists(finished_race(VALUES | others), 1)]
    assert found == ["fedavg", "finetune", "local", "fedprox", "feddyn", "fedyogi"]


def test_by_loss_the_best_global_model_is_that_of_the_lowest() -> None:
    others = {"fedprox": (0.1, 0.6), "feddyn": (0.2, 0.9), "scaffold": (0.3, 0.6), "fedyogi": (0.4, 0.2)}
    found = [c.method for c in finalists(finished_race(VALUES | others), -1)]
    assert found[-3:] == ["fedprox", "feddyn", "fedyogi"]


def test_the_numbers_of_the_answer_are_those_of_the_test_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed on one thread, as in a run: on a busy machine several threads take twenty times as long."""
    experiment = fedskew.Experiment(
        split="sample:keep=300+dirichlet:alpha=0.3,clients=4", model="mlp:hidden=16", rounds=1
    )
    scorer = Scorer(experiment, Goal("own", "accuracy"), tmp_path, Budget(10, "rounds"), every=1)
    candidate = Candidate("fedavg", 0.1)
    on_validation = scorer.score(candidate, 0, 1)
    trial = scorer.experiment(candidate, 0, 1)
    run = fedskew.Run(replace(trial, evaluation=replace(trial.evaluation, part="test")), workers=1)
    list(run)
    assert run.result is not None
    threads, evaluate = [], Simulation.evaluate

    def watched(self: Simulation, *given: Any) -> Any:
        threads.append(torch.get_num_threads())
        return evaluate(self, *given)

    monkeypatch.setattr(Simulation, "evaluate", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = on_test(scorer, candidate, 0, 1)
    torch.set_num_threads(before)
    assert threads == [1]
    assert found == scorer.goal.figure.read(run.result)
    assert found != pytest.approx(on_validation.value)
