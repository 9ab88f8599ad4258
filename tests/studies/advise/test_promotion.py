"""Who goes on in a race: paired tests over seeds and clients decide, never one number; slow starters get a grace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.promotion import (
    ALWAYS_RUN,
    BEHIND,
    BEST_GLOBAL,
    CUT,
    LEADS,
    RISES,
    Fate,
    differences,
    promote,
    rise,
    signed_rank,
)
from fedskew.studies.advise.scoring import Candidate, Score

OWN = Goal("own", "accuracy")


def scores(
    name: str,
    *by_seed: Sequence[float],
    lr: float = 0.1,
    failed: str = "",
    before: float | None = None,
    shared: float | None = None,
) -> tuple[Candidate, list[Score]]:
    """Scores of a candidate: for each seed its clients' values. `before` is the evaluation five rounds earlier."""
    made = []
    for seed, clients in enumerate(by_seed):
        value = None if failed else sum(clients) / len(clients)
        curve = [(5, before), (10, value)] if before is not None and value is not None else []
        made.append(
            Score(
                method=name,
                lr=lr,
                seed=seed,
                rounds=10,
                value=value,
                shared=shared,
                clients=dict(enumerate(clients)),
                curve=curve,
                failed=failed,
            )
        )
    return Candidate(name, lr), made


def fates(*given: tuple[Candidate, list[Score]], keep: int = 1, left: int = 0, goal: Goal = OWN) -> dict[str, Fate]:
    return {f.candidate.method: f for f in promote(dict(given), keep, left, goal, ("fedavg",))}


UNEVEN = [0.1, 0.5, 0.9, 0.3, 0.7, 0.2]  # clients differ far more than methods do


def test_a_small_lead_with_every_client_is_told_apart_though_clients_differ_far_more() -> None:
    found = fates(
        scores("fedprox", [v + 0.02 for v in UNEVEN], [v + 0.03 for v in UNEVEN]),
        scores("scaffold", UNEVEN, UNEVEN),
        keep=5,
    )
    assert found["fedprox"].why == LEADS
    assert found["scaffold"].why == BEHIND
    assert not found["scaffold"].kept


def test_a_lead_that_one_client_makes_is_not_told_apart_and_a_cut_says_so() -> None:
    lucky = [0.9, *UNEVEN[1:]]
    found = fates(scores("fedprox", lucky, UNEVEN), scores("scaffold", UNEVEN, UNEVEN), keep=1)
    assert found["scaffold"].why == CUT
    assert found["scaffold"].p is not None
    assert found["scaffold"].p > 0.05
    assert fates(scores("fedprox", lucky, UNEVEN), scores("scaffold", UNEVEN, UNEVEN), keep=2)["scaffold"].kept


def test_with_two_clients_nothing_is_called_behind() -> None:
    """Four pairs give a one-sided p of 1/16 at best."""
    found = fates(scores("fedprox", [0.9, 0.9], [0.9, 0.9]), scores("scaffold", [0.1, 0.2], [0.1, 0.3]), keep=1)
    assert found["scaffold"].why == CUT


def test_one_of_many_candidates_is_not_called_behind_by_chance() -> None:
    """A p of 1/32 (five clients, one seed) would be below 5 %; among forty candidates that is to be expected."""
    level = [0.5] * 5
    worse = scores("scaffold", [0.4, 0.41, 0.42, 0.43, 0.44])
    many = [scores("fedprox", level, lr=0.1 + i / 100) for i in range(40)]
    assert fates(many[0], worse, keep=50)["scaffold"].why == BEHIND
    assert fates(*many, worse, keep=50)["scaffold"].why != BEHIND


def test_a_diverged_candidate_neither_wins_nor_ends_the_race() -> None:
    found = fates(scores("fedprox", [0.5]), scores("feddyn", [1.0], failed="the run diverged in round 2"))
    assert found["fedprox"].why == LEADS
    assert not found["feddyn"].kept
    assert "diverged" in found["feddyn"].why
    assert [f.kept for f in promote(dict([scores("fedprox", [1.0], failed="no")]), 1, 0, OWN, ())] == [False]


def test_a_slow_starter_that_would_catch_up_goes_on_though_it_is_behind() -> None:
    """Behind by 0.2 with 20 rounds left: it gains 0.02 a round on the leader, so it passes; at 0.002 it does not."""
    leader = scores("fedprox", [0.8] * 8, [0.81] * 8, before=0.805)
    slow = scores("feddyn", [0.6] * 8, [0.61] * 8, before=0.505)
    flat = scores("scaffold", [0.6] * 8, [0.61] * 8, before=0.595)
    found = fates(leader, slow, flat, left=20)
    assert found["feddyn"].why == RISES
    assert found["feddyn"].kept
    assert found["scaffold"].why == BEHIND
    assert fates(leader, slow, left=2)["feddyn"].why == BEHIND


def test_fedavg_stays_with_two_learning_rates_and_not_with_a_third() -> None:
    given = [scores("fedavg", [v] * 8, [v] * 8, lr=lr) for v, lr in ((0.5, 0.1), (0.4, 0.2), (0.3, 0.3))]
    kept = {
        f.candidate.lr: f.why
        for f in promote(dict([scores("fedprox", [0.9] * 8, [0.9] * 8), *given]), 1, 0, OWN, ("fedavg",))
        if f.candidate.method == "fedavg"
    }
    assert kept == {0.1: ALWAYS_RUN, 0.2: ALWAYS_RUN, 0.3: BEHIND}


def test_the_best_global_model_goes_on_though_personal_models_are_judged() -> None:
    found = fates(
        scores("fedrep", [0.9] * 8, [0.9] * 8),
        scores("feddyn", [0.5] * 8, [0.5] * 8, shared=0.7),
        scores("fedprox", [0.6] * 8, [0.6] * 8, shared=0.6),
    )
    assert found["feddyn"].why == BEST_GLOBAL
    assert found["fedprox"].why == BEHIND


def test_where_lower_is_better_the_lowest_leads() -> None:
    found = fates(scores("fedprox", [0.5, 0.6]), scores("scaffold", [0.4, 0.5]), goal=Goal("own", "loss"))
    assert found["scaffold"].why == LEADS


@pytest.mark.parametrize("common", [{0: [0.5, 0.6]}, {}])
def test_candidates_without_a_common_client_or_a_difference_are_not_told_apart(common: dict[int, list[float]]) -> None:
    one, other = scores("fedprox", [0.5, 0.6]), scores("scaffold", [0.5, 0.6])
    if not common:
        other = (other[0], [Score(method="scaffold", lr=0.1, seed=0, rounds=10, value=0.5, clients={7: 0.5})])
    assert promote(dict([one, other]), 2, 0, OWN, ())[1].p == 1.0


@pytest.mark.parametrize("count", [1, 3, 6, 9, 30])
@pytest.mark.parametrize("digits", [0, 1, 9])
def test_the_signed_rank_test_is_scipy_s(count: int, digits: int) -> None:
    """Rounded to few digits there are ties and zeros, which is where scipy's own is slow."""
    rng = np.random.default_rng(count)
    found = np.round(rng.normal(0.3, 1, count), digits)
    expected = stats.wilcoxon(found[found != 0], alternative="greater").pvalue if found.any() else 1.0
    assert signed_rank(found) == pytest.approx(float(expected), abs=1e-12)


def test_no_differences_are_no_evidence() -> None:
    assert signed_rank(np.zeros(4)) == 1.0


def test_a_client_is_paired_with_itself_under_the_same_seed() -> None:
    """Values 1, 2 and 10, 20 less 0.5, 1 and 9, 17: the seed changes them more than the method does."""
    _, leader = scores("fedprox", [1.0, 2.0], [10.0, 20.0])
    _, other = scores("scaffold", [0.5, 1.0], [9.0, 17.0])
    assert differences(leader, other) == [0.5, 1.0, 1.0, 3.0]
    assert differences(leader, other[1:]) == [1.0, 3.0]


def test_a_rise_is_by_round_not_by_evaluation() -> None:
    """From 0.5 to 0.6 in the five rounds between two evaluations: 0.02 a round."""
    _, made = scores("fedprox", [0.6], before=0.5)
    assert rise(made) == pytest.approx(0.02)
