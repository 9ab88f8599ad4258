"""The first rung of a race: FedAvg is tuned before anything else is tried. No training: scores are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from fedskew.experiment.config import Experiment
from fedskew.studies.advise import race as race_module
from fedskew.studies.advise.budget import Budget, BudgetUsed
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.race import Race, run_race
from fedskew.studies.advise.scoring import Candidate, Score, Scorer, State


class Recorded:
    """Stands for a `Scorer`: every run costs its rounds, and which ones were made is kept in order."""

    def __init__(self, limit: float, rounds: int = 5) -> None:
        self.base, self.goal, self.budget = Experiment(rounds=rounds), Goal("own", "accuracy"), Budget(limit, "rounds")
        self.state, self.made = State(settings=""), list[Candidate]()

    def decided(self, stage: str, decide: Callable[[], list[Candidate]]) -> list[Candidate]:
        return decide()

    def predicted(self, candidate: Candidate, seed: int, rounds: int) -> float:
        return rounds

    def score(self, candidate: Candidate, seed: int, rounds: int, most: float = float("inf")) -> Score:
        if self.budget.left <= 0:
            raise BudgetUsed
        self.budget.spent += rounds
        self.made.append(candidate)
        clients = dict.fromkeys(range(4), 0.5)
        return Score(method=candidate.method, lr=candidate.lr, seed=seed, rounds=rounds, value=0.5, clients=clients)

    def forget(self, candidate: Candidate, seeds: object, rounds: int) -> None:
        pass


def raced(limit: float, rounds: int = 5) -> tuple[Race, list[Candidate]]:
    scorer = Recorded(limit, rounds)
    return run_race(cast(Scorer, scorer), ["fedavg", "fedavgm", "finetune", "local", "fedprox"], rounds), scorer.made


def test_fedavg_tries_every_learning_rate_before_others_try_one() -> None:
    """A budget of 70 rounds, 7 candidates with two seeds: a lead over a FedAvg with one rate would say nothing."""
    race, made = raced(70)
    assert [c.lr for c in made[:6:2]] == [0.1, 0.03, 0.3]
    assert {c.method for c in made[:6]} == {"fedavg"}
    assert {c.method for c in made} == {"fedavg", "fedavgm", "finetune", "local"}
    assert "fedprox lr=0.1" in race.left_out


def test_with_enough_budget_every_method_tries_every_rate() -> None:
    _, made = raced(10_000)
    for method in ("fedavgm", "local", "fedprox"):
        assert {0.1, 0.03, 0.3} <= {c.lr for c in made if c.method == method}


def test_a_race_without_budget_for_a_rival_stops_and_leaves_the_rest_to_the_final() -> None:
    """15 of 30 rounds would be too many for all but FedAvg: it must not go on alone, with nobody to compare it to."""
    race, made = raced(100, rounds=30)
    assert [rung.rounds for rung in race.rungs] == [5]
    assert len({candidate.name for candidate in race.scores}) > 1
    assert len(made) * 5 < 100


def test_a_slow_starter_is_judged_by_the_rounds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 rounds the rungs are 5, 15 and 30: 25 and 15 are left. What is tried further has no grace, nor the end."""
    left, real = [], race_module.promote

    def watched(scores: Any, keep: int, rest: int, *more: Any) -> Any:
        left.append(rest)
        return real(scores, keep, rest, *more)

    monkeypatch.setattr(race_module, "promote", watched)
    race, _ = raced(1e6, rounds=30)
    assert left == [0, 25, 15, 0]
    assert [rung.rounds for rung in race.rungs] == [5, 15, 30]
