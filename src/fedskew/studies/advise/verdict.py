"""What the final runs say: the method to use, what cannot be told apart from it, and when to abstain.

A method is recommended only if its lead over tuned FedAvg on validation data, over the final seeds, has an interval
that leaves out 0 even when it allows for the number of methods in the final. Otherwise the answer is FedAvg.

Such an interval lies wholly above 0 by chance with a probability of 2.5 % (and as often below). The verdict is looked
at once or twice (see finals.py), so FedAvg's equals are recommended in at most 5 % of all races.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from fedskew.evaluation.figures import Figure
from fedskew.studies.ranking import FEWEST, LEVEL, Standing, gap_text, rank

# A spread over seeds counts as at least this share of the median of all candidates. In simulations of noise (six
# candidates, three seeds, scores rounded to steps of 0 to 6 standard deviations) 0.5 % at most are recommended with it
# and 5.4 % without; leads of four standard deviations are found almost as often.
LEAST = 0.5
Values = Mapping[str, Mapping[int, float]]  # by candidate and seed


@dataclass(frozen=True)
class Verdict:
    """The decision, from validation data alone."""

    choice: str  # a candidate
    certain: bool  # whether it is told apart from the baseline; False: the choice is the baseline
    standings: list[Standing]  # best first
    ties: list[str]  # candidates that cannot be told apart from the choice


def decide(values: Values, figure: Figure, baseline: str) -> Verdict:
    """The candidate to use, by its figure with each seed. One that failed with a seed is not recommended."""
    standings = rank(values, figure, baseline)
    margins = margins_of(values, baseline, len(values[baseline]))
    told = [s for s in standings if s.over and abs(s.over.mean) > margins.get(s.method, math.inf)]
    better = [s for s in told if s.over and _is_better(s.over.mean, figure)]
    choice = better[0].method if better else baseline
    ties = [s.method for s in rank(values, figure, choice) if s.over and not s.over.certain]
    return Verdict(choice, bool(better), standings, ties)


def margins_of(values: Values, baseline: str, seeds: int) -> dict[str, float]:
    """What each candidate's mean lead must exceed with so many seeds, if differences vary between seeds as they do.

    Half the width of the t interval at 95 %, Bonferroni-corrected for the number of candidates. Candidates that lack a
    seed are left out, and nobody is in it with fewer than three seeds. A spread counts as at least half the median of
    all: on a small validation set the differences of a few seeds agree by chance, and have no spread at all.
    """
    base = values[baseline]
    if len(base) < FEWEST or seeds < FEWEST:
        return {}
    gaps = {
        name: [of[s] - base[s] for s in base]
        for name, of in values.items()
        if name != baseline and base.keys() <= of.keys()
    }
    spreads = {name: statistics.stdev(of) for name, of in gaps.items()}
    usual = statistics.median([spread for name, spread in spreads.items() if any(gaps[name])] or [0.0])
    others = sum(bool(of) for name, of in values.items() if name != baseline)
    quantile = float(stats.t.ppf(1 - (1 - LEVEL) / 2 / max(others, 1), seeds - 1))
    return {name: quantile * max(spread, LEAST * usual) / math.sqrt(seeds) for name, spread in spreads.items()}


def seeds_to_tell(verdict: Verdict, values: Values, figure: Figure, baseline: str, most: int) -> tuple[str, int] | None:
    """The open lead that fewest seeds would decide if mean and spread stay as they are: (candidate, seeds in all).

    None if something is decided already, nothing leads, or `most` seeds are not enough.
    """
    if verdict.certain:
        return None
    leads = {s.method: abs(s.over.mean) for s in verdict.standings if s.over and _is_better(s.over.mean, figure)}
    for seeds in range(len(values[baseline]) + 1, most + 1):
        margins = margins_of(values, baseline, seeds)
        told = [name for name, lead in leads.items() if lead > margins.get(name, math.inf)]
        if told:
            return told[0], seeds
    return None


def _is_better(difference: float, figure: Figure) -> bool:
    return difference > 0 if figure.better == "higher" else difference < 0


def sentence(
    verdict: Verdict, tested: Values, figure: Figure, baseline: str, names: Mapping[str, str], alone: str | None
) -> str:
    """The answer in words that a person can act on.

    Args:
        verdict: the decision.
        tested: the figure on the test parts; it gives the numbers, and says whether the decision is confirmed.
        figure: what is judged.
        baseline: the candidate that is tuned FedAvg.
        names: of candidates, as they are shown.
        alone: the candidate that is training alone; None: it was not run.
    """
    seeds = max((len(s.values) for s in verdict.standings), default=0)
    shown = {s.method: s for s in rank(tested, figure, baseline)}
    if seeds < FEWEST:
        return (
            f"There is no answer: the budget was enough for {seeds} of the {FEWEST} seeds that it takes to tell a "
            f"difference from luck. Until then use {names[baseline]}, or give advise a larger budget."
        )
    if not any(s.values for s in verdict.standings if s.method != baseline):
        return (
            "There is no answer: the budget was not enough to compare tuned FedAvg with another method. Until then use "
            f"{names[baseline]}, or give advise a larger budget."
        )
    parts = _lead(verdict, shown, figure, baseline, names, alone)
    if verdict.certain and (others := [t for t in verdict.ties if t != alone]):
        parts.append(f"{listed([names[t] for t in others])} cannot be told apart from it")
    if alone is not None and verdict.choice != alone and alone in shown:
        value = f"{figure.text(shown[alone].mean)} {figure.unit}".strip()
        same = ", which cannot be told apart from it" if alone in verdict.ties and verdict.certain else ""
        parts.append(f"training alone gives {value}{same}")
    return "; ".join(parts) + "."


def _lead(
    verdict: Verdict,
    shown: Mapping[str, Standing],
    figure: Figure,
    baseline: str,
    names: Mapping[str, str],
    alone: str | None,
) -> list[str]:
    """The first part of the sentence: what to use, and how far it is ahead."""
    base = f"{figure.text(shown[baseline].mean)} {figure.unit}".strip()
    if not verdict.certain:
        use = f"No method is shown to be better than tuned FedAvg on these data: use {names[baseline]}, {base}"
        return [use, *_nearest(verdict, figure, names)]
    name, over = names[verdict.choice], shown[verdict.choice].over
    if over is None:
        return [f"Use {name}: it leads on validation data, and has no test figure"]
    sign = "+" if over.mean >= 0 else "-"
    gap = f"{sign}{gap_text(over, figure)} over tuned FedAvg ({base})"
    if not (over.certain and _is_better(over.mean, figure)):
        doubt = f"{names[baseline]} may be as good"
        return [f"{name} leads on validation data, but the test parts do not confirm it: {gap}; {doubt}"]
    if verdict.choice == alone and {s.method for s in verdict.standings} == {alone, baseline}:
        return [f"Training alone is better than FedAvg, the only federated method that was compared: {gap}"]
    if verdict.choice == alone and not verdict.ties:
        return [f"Training alone is better than every federated method that was tried: {gap}"]
    return [f"Use {name}: {gap}"]


def _nearest(verdict: Verdict, figure: Figure, names: Mapping[str, str]) -> list[str]:
    """The method with the best mean, if it is better than the baseline's, and why it was not chosen; else nothing."""
    first = verdict.standings[0]
    if first.over is None or not _is_better(first.over.mean, figure):
        return []
    found = f"{names[first.method]} has the best mean, {gap_text(first.over, figure)} better on validation data"
    if first.over.certain:
        found += (
            f", not enough for the best of {len(verdict.standings) - 1} with {first.over.seeds} seeds: more would tell"
        )
    return [found]


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
