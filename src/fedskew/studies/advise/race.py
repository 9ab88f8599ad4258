"""The race: successive halving over method, learning rate and main weight, on the user's own data.

Every method starts with three learning rates and two seeds. After a few rounds most candidates leave (see promotion.py)
and the others go on, as the same runs with more rounds: rung by rung three times as many. Before the first cut the
methods that are ahead also try a learning rate beyond the best one if that is at the edge, and two other values of
their main weight. A method whose schedule depends on the number of rounds starts again instead, at the budget's cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedskew.experiment.config import method_of
from fedskew.experiment.given import method_text
from fedskew.studies.advise.budget import BudgetUsed
from fedskew.studies.advise.promotion import Fate, Scores, mean_value, promote
from fedskew.studies.advise.scoring import RACE_SEEDS, Candidate, Score, Scorer
from fedskew.studies.advise.shortlist import ALWAYS
from fedskew.studies.tune import declared_ranges

ETA = 3  # a rung has three times the rounds of the one before, and about a third of its candidates
GRACE = 5  # rounds before anything is judged
RACE_SHARE = 0.6  # of the budget; the rest is for the final runs
FIRST_SHARE = 0.6  # of the race, for the first rung
SLOWEST = 0.1  # of the race, for one run of the first rung; a slower method is left out
STEP = math.sqrt(10)  # between learning rates


@dataclass(frozen=True)
class Rung:
    """What was found after some rounds."""

    rounds: int
    fates: list[Fate]


@dataclass
class Race:
    """The finished race."""

    rungs: list[Rung]
    scores: dict[Candidate, list[Score]]  # of the candidates in the last rung
    left_out: dict[str, str]  # what the budget did not allow, and why

    def best(self, sign: int) -> dict[str, Candidate]:
        """The best candidate of each method that is left, best method first."""
        means = {c: v for c, of in self.scores.items() if (v := mean_value(of)) is not None}
        found: dict[str, Candidate] = {}
        for candidate in sorted(means, key=lambda c: -sign * means[c]):
            found.setdefault(candidate.name, candidate)
        return found


def rungs_of(rounds: int) -> list[int]:
    """The rounds after which candidates are judged.

    >>> rungs_of(30), rungs_of(100), rungs_of(3)
    ([5, 15, 30], [17, 51, 100], [3])
    """
    rung, found = max(GRACE, math.ceil(rounds / 6)), []
    while rung < rounds:
        found.append(rung)
        rung *= ETA
    return [*found, rounds]


def rates_around(lr: float) -> list[float]:
    """The learning rates to try, the given one first; the others are rounded to one digit.

    >>> rates_around(0.1)
    [0.1, 0.03, 0.3]
    """
    return [lr, float(f"{lr / STEP:.1g}"), float(f"{lr * STEP:.1g}")]


def weights_around(candidate: Candidate) -> list[Candidate]:
    """The candidate with two other values of its main weight: the first setting that declares a range to search.

    They are halfway, on a log scale, from its value to the ends of the range.

    >>> weights_around(Candidate("fedprox", 0.1))
    [Candidate(method='fedprox:mu=0.003', lr=0.1), Candidate(method='fedprox:mu=0.1', lr=0.1)]
    """
    method = method_of(candidate.method)
    for name, (low, high) in declared_ranges(type(method)).items():
        value = getattr(method, name)
        if value is None or not low <= value <= high:
            value = math.sqrt(low * high)
        others = (float(f"{math.sqrt(value * end):.1g}") for end in (low, high))
        made = [method_text(replace(method, **{name: other})) for other in others]
        return [Candidate(text, candidate.lr) for text in dict.fromkeys(made) if text != candidate.method]
    return []


def run_race(scorer: Scorer, methods: Sequence[str], rounds: int) -> Race:
    """Race the methods. Ends early, with what is known, if the budget ends."""
    rungs, race = rungs_of(rounds), Race([], {}, scorer.state.left_out)
    limit = scorer.budget.limit * RACE_SHARE
    share = limit * (FIRST_SHARE if len(rungs) > 1 else 1)
    scores = _first_rung(scorer, methods, rungs[0], share, SLOWEST * limit, race)
    for i, rung in enumerate(rungs):
        if i:
            share = limit if i == len(rungs) - 1 else (scorer.budget.spent + limit) / 2
            scores = _continued(scorer, race, rung, share, f"{rung} rounds")
            if not any(score.value is not None for of in scores.values() for score in of):
                break  # the budget ended: the last rung that was finished counts
        race.scores = {candidate: list(of) for candidate, of in scores.items()}
        if rung == rounds:
            break
        keep = math.ceil(len(scores) / ETA)
        fates = promote(scores, keep, rounds - rung, scorer.goal, ALWAYS)
        race.rungs.append(Rung(rung, fates))
        race.scores = {fate.candidate: list(scores[fate.candidate]) for fate in fates if fate.kept}
        for fate in fates:
            if not fate.kept:
                scorer.forget(fate.candidate, RACE_SEEDS, rung)
    reached = max((score.rounds for of in race.scores.values() for score in of), default=0)
    if not race.rungs or race.rungs[-1].rounds < reached:
        race.rungs.append(Rung(reached, promote(race.scores, len(race.scores), 0, scorer.goal, ())))
    return race


def _first_rung(scorer: Scorer, methods: Sequence[str], rounds: int, share: float, most: float, race: Race) -> Scores:
    """Score every method with each learning rate, then the further ones of those that are ahead.

    `share` is what all of it may cost, `most` what one run may.
    """
    lr = scorer.base.training.lr
    middle, *others = rates_around(lr)
    scores: dict[Candidate, list[Score]] = {}
    everyone = [Candidate(text, rate) for rate in (middle, *others) for text in methods]
    # FedAvg first, with every rate: a lead over a FedAvg that was not tuned would say nothing
    for candidate in sorted(everyone, key=lambda c: c.name != "fedavg"):
        _try(scorer, candidate, rounds, share, most, scores, race)
    for candidate in scorer.decided("further", lambda: _further(scores, scorer, lr)):
        _try(scorer, candidate, rounds, share, most, scores, race)
    return scores


def _further(scores: Scores, scorer: Scorer, lr: float) -> list[Candidate]:
    """Learning rates beyond the edge and other weights, of the methods that go on."""
    keep = math.ceil(len(scores) / ETA)
    fates = promote(scores, keep, 0, scorer.goal, ALWAYS)
    best: dict[str, Candidate] = {}
    for fate in fates:
        if fate.kept:
            best.setdefault(fate.candidate.name, fate.candidate)
    found = []
    _, low, high = rates_around(lr)
    for candidate in best.values():
        if candidate.lr in (low, high):
            beyond = candidate.lr * (STEP if candidate.lr == high else 1 / STEP)
            found.append(replace(candidate, lr=float(f"{beyond:.1g}")))
        found += weights_around(candidate)
    return found


def _try(
    scorer: Scorer,
    candidate: Candidate,
    rounds: int,
    share: float,
    most: float,
    scores: dict[Candidate, list[Score]],
    race: Race,
) -> None:
    """Score a candidate with every seed, if the budget's `share` allows. Scored anyway: FedAvg, and others in ALWAYS
    with the given learning rate."""
    if {candidate.method, str(candidate)} & race.left_out.keys():
        return
    needed = candidate.method in ALWAYS and (candidate.name == "fedavg" or candidate.lr == scorer.base.training.lr)
    cost = sum(scorer.predicted(candidate, seed, rounds) for seed in RACE_SEEDS)
    if cost and not needed and scorer.budget.spent + cost > share:
        race.left_out[str(candidate)] = "the budget was not enough to try it"
        return
    found = []
    try:
        for seed in RACE_SEEDS:
            found.append(scorer.score(candidate, seed, rounds, float("inf") if needed else most))
            if found[-1].failed:
                break
    except BudgetUsed:
        if scorer.budget.left > 0:
            race.left_out[candidate.method] = "its rounds take too long for this budget"
            return
        race.left_out[str(candidate)] = "the budget ended"
    if found and (needed or found[-1].failed or len(found) == len(RACE_SEEDS)):
        scores[candidate] = found


def _continued(scorer: Scorer, race: Race, rounds: int, share: float, stage: str) -> Scores:
    """Score the candidates that go on after more rounds; the last ones are left out if the `share` does not allow.

    Empty, and nothing is run, if it allows FedAvg alone: the rest of the budget is better spent on the final.
    """
    order = list(race.scores)  # best first

    def affordable() -> list[Candidate]:
        spent, chosen = scorer.budget.spent, []
        for candidate in sorted(order, key=lambda c: c.name != "fedavg"):
            spent += sum(scorer.predicted(candidate, seed, rounds) for seed in RACE_SEEDS)
            if spent <= share or candidate.name == "fedavg":
                chosen.append(candidate)
        return chosen

    chosen = scorer.decided(stage, affordable)
    if {c.name for c in chosen} == {"fedavg"} != {c.name for c in order}:
        return {}
    scores: dict[Candidate, list[Score]] = {}
    for candidate in order:
        if candidate not in chosen:
            race.left_out[str(candidate)] = (
                f"not told apart after fewer rounds, but {stage} were too many for the budget"
            )
            continue
        try:
            scores[candidate] = [scorer.score(candidate, seed, rounds) for seed in RACE_SEEDS]
        except BudgetUsed:
            race.left_out[str(candidate)] = "the budget ended"
    return scores
