"""Which candidates of a race go on: paired tests over seeds and clients, and an exception for slow starters.

A candidate is behind the leader if a Wilcoxon signed-rank test of the paired differences, one for each seed and client,
says so at a false discovery rate of 5 % over all candidates. One seed's clients share a model, so this is a screen, not
a claim: claims are made from fresh seeds (see finals.py). A candidate that is not behind and has to leave all the same,
because a race goes on with a share of its candidates, is recorded as such.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.scoring import Candidate, Score

RATE = 0.05  # false discoveries among the candidates that are called behind
FEW = 13  # differences whose signs are all tried, as scipy does
PER_METHOD = 2  # candidates of one method that go on: a second learning rate may be better in the end
Scores = Mapping[Candidate, Sequence[Score]]  # one score a seed


@dataclass(frozen=True)
class Fate:
    """What became of one candidate after some rounds."""

    candidate: Candidate
    kept: bool
    why: str  # one of the words below, or why the candidate failed
    value: float | None  # mean over seeds
    p: float | None = None  # of the test against the leader, adjusted; None: it is the leader, or failed


LEADS, GOES_ON, ALWAYS_RUN = "leads", "goes on", "always runs"
RISES, BEHIND, CUT = "still rises faster than the leader", "behind the leader", "not told apart, not among the first"
BEST_GLOBAL = "best global model"


def mean_value(scores: Sequence[Score]) -> float | None:
    """The mean over seeds; None if one failed or there is none."""
    values = [score.value for score in scores]
    return statistics.mean(v for v in values if v is not None) if values and None not in values else None


def differences(a: Sequence[Score], b: Sequence[Score]) -> list[float]:
    """The contributions of each client with each seed, of `a` less those of `b`."""
    other = {score.seed: score.clients for score in b}
    return [v - other[s.seed][c] for s in a if s.seed in other for c, v in s.clients.items() if c in other[s.seed]]


def behind(leader: Sequence[Score], others: Scores, sign: int) -> dict[Candidate, float]:
    """For each candidate the adjusted p-value of "it is not behind the leader"."""
    raw = {}
    for candidate, scores in others.items():
        found = sign * np.array(differences(leader, scores))
        raw[candidate] = signed_rank(found)
    if not raw:
        return {}
    adjusted = stats.false_discovery_control(list(raw.values()), method="bh")
    return dict(zip(raw, map(float, adjusted), strict=True))


def signed_rank(differences: np.ndarray) -> float:
    """The p-value of Wilcoxon's signed-rank test of "the differences are not positive"; 1.0 if all are 0.

    scipy's, but for ties among a few differences: it then tries all signs one at a time, which takes seconds for each
    candidate. Ranks do not change with signs, so all are tried at once here, with the same result.
    """
    found = differences[differences != 0]
    if not 1 < len(found) <= FEW:  # one has no ties
        return float(stats.wilcoxon(found, alternative="greater").pvalue) if len(found) else 1.0
    ranks = np.sign(found) * stats.rankdata(np.abs(found))
    tested = stats.permutation_test(
        (ranks,),
        lambda x, axis: np.clip(x, 0, None).sum(axis=axis),
        vectorized=True,
        permutation_type="samples",
        alternative="greater",
        n_resamples=2**FEW,
    )
    return float(tested.pvalue)


def rise(scores: Sequence[Score]) -> float:
    """By how much the curve rose a round over its last two evaluations, mean over seeds; 0 with fewer."""
    found = []
    for score in scores:
        if len(score.curve) >= 2:
            (r0, v0), (r1, v1) = score.curve[-2:]
            found.append((v1 - v0) / max(r1 - r0, 1))
    return statistics.mean(found) if found else 0.0


def catches_up(scores: Sequence[Score], leader: Sequence[Score], left: int, sign: int) -> bool:
    """Whether a candidate would pass the leader within the rounds that are left, if both rise on as they do."""
    own, other = mean_value(scores), mean_value(leader)
    if own is None or other is None:
        return False
    faster = sign * (rise(scores) - rise(leader))
    return faster > 0 and faster * left >= sign * (other - own)


def promote(scores: Scores, keep: int, left: int, goal: Goal, always: Sequence[str]) -> list[Fate]:
    """What becomes of each candidate, best first.

    Args:
        scores: of every candidate, with the same seeds.
        keep: how many go on by their rank. Further ones do: two of each method in `always`, the best global model, and
            up to half as many again that are behind but still rise faster than the leader.
        left: rounds that the race still has.
        goal: what is judged.
        always: names of methods that stay in the race.
    """
    sign = goal.sign
    means = {c: mean_value(of) for c, of in scores.items()}
    failed = [Fate(c, False, _failure(scores[c]), None) for c, v in means.items() if v is None]
    order = sorted((c for c, v in means.items() if v is not None), key=lambda c: -sign * (means[c] or 0.0))
    if not order:
        return failed
    leader = order[0]
    p = behind(scores[leader], {c: scores[c] for c in order[1:]}, sign)
    best_global = max(order, key=lambda c: _shared(scores[c], sign))
    kept: dict[str, int] = {}  # by method
    ranked = graced = 0
    fates = []
    for candidate in order:
        name = candidate.name
        room = kept.get(name, 0) < PER_METHOD
        is_behind = candidate is not leader and p[candidate] <= RATE
        rises = is_behind and catches_up(scores[candidate], scores[leader], left, sign)
        if candidate is leader:
            why = LEADS
        elif name in always and room:
            why = ALWAYS_RUN
        elif candidate is best_global and math.isfinite(_shared(scores[candidate], sign)):
            why = BEST_GLOBAL
        elif rises and room and graced < max(1, keep // 2):
            why = RISES
        elif is_behind and not rises:
            why = BEHIND
        else:
            why = GOES_ON if room and ranked < keep and not is_behind else CUT
        goes = why not in (BEHIND, CUT)
        graced += why == RISES
        ranked += why in (LEADS, GOES_ON)
        kept[name] = kept.get(name, 0) + goes
        fates.append(Fate(candidate, goes, why, means[candidate], p.get(candidate)))
    return fates + failed


def _shared(scores: Sequence[Score], sign: int) -> float:
    """The global model's figure, higher is better; minus infinity if there is none."""
    values = [score.shared for score in scores if score.shared is not None]
    return sign * statistics.mean(values) if values else -math.inf


def _failure(scores: Sequence[Score]) -> str:
    return next((score.failed for score in scores if score.failed), "has no such figure")
