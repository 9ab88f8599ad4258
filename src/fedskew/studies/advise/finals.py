"""The final runs: the race's leaders beside tuned FedAvg, fine-tuned FedAvg and training alone, on fresh paired seeds.

They are judged on validation data as before. The clients' test parts are read once, when everything is decided, for the
numbers of the answer.

A lead that the first seeds leave open may need more of them. How many the budget allows is decided before the first
final run, from what rounds cost in the race, so that it does not depend on the figures; then the verdict is looked at
twice at most, after the first seeds and after all (see verdict.py for what that costs).

Where the budget is not enough for three seeds of two methods, the final is cut short: FedAvg, training alone and the
race's leader, with fewer rounds. It shows who is ahead by then, and recommends nothing (see advice.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError
from fedskew.experiment.assemble import assemble
from fedskew.experiment.run_directory import read_run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.studies.advise.budget import BudgetUsed
from fedskew.studies.advise.promotion import mean_value
from fedskew.studies.advise.race import RACE_SHARE, Race, rungs_of
from fedskew.studies.advise.scoring import RACE_SEEDS, Candidate, Score, Scorer
from fedskew.studies.advise.verdict import decide, seeds_to_tell
from fedskew.studies.ranking import FEWEST

BASELINE = "fedavg"
ALONE = "local"
BESIDE = ("finetune", ALONE)  # always in the final, with FedAvg
LEADERS = 3  # further methods in the final
SHORTEST = 5  # rounds of a final that the budget cuts short; fewer say nothing
SLACK = 0.8  # of the budget that is left for such a final: rounds may get slower
MOST = 20  # seeds in all if the first ones leave a lead open


@dataclass(frozen=True)
class Finals:
    """The final runs, all candidates with the same seeds."""

    scores: dict[Candidate, dict[int, Score]]  # by seed; FedAvg first
    wanted: int  # seeds that all candidates were to have at first
    left_out: dict[str, str]  # leaders of the race that the budget did not allow
    enough: float = 0.0  # about the budget that a race and a final of two methods with three seeds need
    rounds: int = 0  # of the final runs
    whole: int = 0  # rounds that they were to have

    @property
    def short(self) -> bool:
        """Whether the runs were cut short."""
        return self.rounds < self.whole

    @property
    def seeds(self) -> list[int]:
        """The seeds that every candidate finished, or failed with."""
        return list(next(iter(self.scores.values()), {}))

    def values(self, field: str = "value") -> dict[str, dict[int, float]]:
        """A field of the scores by candidate and seed; those that failed or have none are left out."""
        return {
            str(c): {seed: v for seed, score in of.items() if (v := getattr(score, field)) is not None}
            for c, of in self.scores.items()
        }


def finalists(race: Race, sign: int) -> list[Candidate]:
    """Who is in the final: tuned FedAvg, fine-tuned FedAvg and local, then the other methods, best first.

    The one with the best global model is among the first of these. Raises BudgetUsed if FedAvg was not scored at all.
    """
    best = race.best(sign)
    if BASELINE not in best:
        failed = [fate.why for rung in race.rungs for fate in rung.fates if fate.candidate.name == BASELINE]
        if not failed:
            raise BudgetUsed
        raise UsageError(f"fedavg cannot be run on these data: {failed[0]}.")
    others = [c for name, c in best.items() if name not in (BASELINE, *BESIDE)]
    shared = {c: v for c in others if (v := _mean_shared(race.scores[c])) is not None}
    if shared and (first := max(shared, key=lambda c: sign * shared[c])) not in others[:LEADERS]:
        others.insert(LEADERS - 1, first)
    beside = [c for name in BESIDE if (c := best.get(name) or _last_seen(race, name, sign)) is not None]
    return [best[BASELINE], *beside, *others[:LEADERS]]


def _last_seen(race: Race, name: str, sign: int) -> Candidate | None:
    """The best candidate of a method that left the race, by its last rung; None if it has no value."""
    for rung in reversed(race.rungs):
        known = {f.candidate: f.value for f in rung.fates if f.candidate.name == name and f.value is not None}
        if known:
            return max(known, key=lambda c: sign * known[c])
    return None


def _mean_shared(scores: Sequence[Score]) -> float | None:
    return mean_value([Score(method="", lr=0, seed=s.seed, rounds=0, value=s.shared) for s in scores])


def seeds_after(first: Sequence[int], most: int = MOST) -> tuple[int, ...]:
    """The seeds that follow the first ones, so that there are `most` in all.

    >>> seeds_after((0, 1, 2), 5)
    (3, 4)
    """
    found = (seed for seed in range(max(first) + 1, max(first) + most + 3) if seed not in RACE_SEEDS)
    return tuple(found)[: max(most - len(first), 0)]


def run_finals(scorer: Scorer, race: Race, rounds: int, seeds: Sequence[int], more: Sequence[int] = ()) -> Finals:
    """Run the finalists with every seed, as far as the budget goes.

    `more` are seeds for a lead that is open after `seeds`, if they would decide it should it stay as it is.
    """
    try:
        everyone = finalists(race, scorer.goal.sign)
    except BudgetUsed:
        least = enough_for(scorer, [Candidate(BASELINE, scorer.base.training.lr)] * 2, rounds)
        raise UsageError(
            f"the budget is too small: it ended before FedAvg's first {rungs_of(rounds)[0]} rounds did. About "
            f"{scorer.budget.text(least)} should be enough; less with fewer --rounds, or with fewer clients a round "
            "(--clients-per-round)."
        ) from None
    needed = 1 + sum(c.name in BESIDE for c in everyone)
    first = next((c for c in race.best(scorer.goal.sign).values() if c.name != BASELINE), None)
    core = [c for c in everyone if c in (everyone[0], first) or c.name == ALONE]

    def cost(candidates: Sequence[Candidate], some: Sequence[int], length: int = rounds) -> float:
        runs = sum(scorer.predicted(c, seed, length) for c in candidates for seed in some)
        return runs + tests_cost(scorer, candidates, len(some))

    def affordable() -> list[Candidate]:
        for count in (len(seeds), min(FEWEST, len(seeds))):
            for size in range(len(everyone), min(needed, len(everyone) - 1), -1):  # with a leader, if there is one
                if cost(everyone[:size], seeds[:count]) <= scorer.budget.left:
                    return everyone[:size]
        if cost(core, seeds[:FEWEST]) <= scorer.budget.left:
            return core
        left = SLACK * scorer.budget.left
        lengths = (n for n in range(rounds - 1, SHORTEST - 1, -1) if cost(core, seeds[:FEWEST], n) <= left)
        if len(core) > 1 and (length := next(lengths, None)) is not None:
            scorer.state.rounds = length
            return core
        return everyone[: needed + 1]

    chosen = scorer.decided("finals", affordable)
    length = scorer.state.rounds or rounds
    if length < rounds:
        seeds, more = seeds[:FEWEST], ()
    allowed = range(len(more), 0, -1)
    if scorer.state.more is None:
        fits = (n for n in allowed if cost(chosen, [*seeds, *more[:n]]) <= scorer.budget.left)
        scorer.state.more = next(fits, 0)
        scorer.save()
    left_out, enough = _too_many(everyone, chosen), enough_for(scorer, chosen[:2], rounds)
    finals = Finals({candidate: {} for candidate in chosen}, len(seeds), left_out, enough, length, rounds)
    _run_seeds(scorer, finals, length, seeds, core)
    further = more[: scorer.state.more]
    if len(finals.seeds) == len(seeds) and further and _is_open(scorer, finals, len(seeds) + len(further)):
        scorer.ahead = rounds * len(chosen) * len(further)
        _run_seeds(scorer, finals, rounds, further)
    return finals


def enough_for(scorer: Scorer, candidates: Sequence[Candidate], rounds: int) -> float:
    """About the budget that a race and a final of these with three seeds need; at least twice the given one."""
    least = FEWEST * sum(scorer.budget.cost(rounds + 1, scorer.seconds(c)) for c in candidates)
    return max(least / (1 - RACE_SHARE), 2 * scorer.budget.limit)


def tests_cost(scorer: Scorer, candidates: Sequence[Candidate], seeds: int) -> float:
    """What the evaluation on the test parts will cost: each about as long as a round, and preparing the data for it.

    Nothing if rounds are counted.
    """
    if scorer.budget.unit == "rounds":
        return 0.0
    return seeds * sum(scorer.preparing + scorer.seconds(c) for c in candidates)


def _too_many(everyone: Sequence[Candidate], chosen: Sequence[Candidate]) -> dict[str, str]:
    return {str(c): "the budget was not enough for the final" for c in everyone if c not in chosen}


def _is_open(scorer: Scorer, finals: Finals, seeds: int) -> bool:
    """Whether so many seeds in all would decide a lead that is not decided now."""
    values, figure, baseline = finals.values(), scorer.goal.figure, str(next(iter(finals.scores)))
    return seeds_to_tell(decide(values, figure, baseline), values, figure, baseline, seeds) is not None


def _run_seeds(
    scorer: Scorer, finals: Finals, rounds: int, seeds: Sequence[int], core: Sequence[Candidate] = ()
) -> None:
    """Score every candidate of the final with each seed; a seed that the budget does not allow for all is dropped.

    Before there are three seeds, the candidates outside the `core` leave instead: three seeds of a few say more.
    """

    def fits(some: Sequence[int]) -> bool:
        tests = tests_cost(scorer, list(finals.scores), len(finals.seeds) + len(some))
        runs = sum(scorer.predicted(c, seed, rounds) for c in finals.scores for seed in some)
        return runs <= max(scorer.budget.left - tests, 0)

    for i, seed in enumerate(seeds):
        needed = seeds[i : i + max(FEWEST - len(finals.seeds), 0)]
        if core and not fits(needed):
            for candidate in [c for c in finals.scores if c not in core]:
                del finals.scores[candidate]
                finals.left_out[str(candidate)] = "the budget was not enough for three seeds of it"
        if not fits([seed]):
            return
        try:
            found = {candidate: scorer.score(candidate, seed, rounds) for candidate in finals.scores}
        except BudgetUsed:
            return
        for candidate, score in found.items():
            finals.scores[candidate][seed] = score


def test_values(scorer: Scorer, finals: Finals, rounds: int) -> dict[str, dict[int, float]]:
    """The goal's figure on the clients' test parts, by candidate and seed, from the models of the final runs."""
    found: dict[str, dict[int, float]] = {}
    for candidate, of in finals.scores.items():
        values = {seed: on_test(scorer, candidate, seed, rounds) for seed, score in of.items() if not score.failed}
        found[str(candidate)] = {s: v for s, v in values.items() if v is not None and math.isfinite(v)}
    return found


def on_test(scorer: Scorer, candidate: Candidate, seed: int, rounds: int) -> float | None:
    """The goal's figure of a finished run on the clients' test parts. Only personal models may be trained for it."""
    saved = read_run(scorer.path(candidate, seed, rounds))
    trial = scorer.experiment(candidate, seed, rounds)
    experiment = replace(trial, evaluation=replace(trial.evaluation, part="test"))
    where: Mapping[str, object] = {k: v for k, v in scorer.options.items() if k in ("data_dir", "device", "loaded")}
    assembled = assemble(experiment, **where)  # type: ignore[arg-type]
    simulation = Simulation(
        assembled.world,
        store=saved.store(),
        newcomers=assembled.newcomers,
        evaluated=assembled.evaluated,
    )
    with one_thread(), simulation:
        metrics = simulation.evaluate(saved.records[-1].round, experiment.method.broadcast(saved.server()))
    return scorer.goal.figure.of(metrics)
