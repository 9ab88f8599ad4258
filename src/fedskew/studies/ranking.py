"""Methods in order of one figure, and how far each is ahead of the baseline, paired by seed.

Comparisons and reports share it. A difference counts only if its interval over seeds leaves out 0, and the best of
several methods only if it still does when the interval allows for their number: one of many looks best by chance.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from fedskew.evaluation.figures import FIGURES, Figure, leading_figure
from fedskew.evaluation.metrics import Metrics

BASELINE = "fedavg"
LEVEL = 0.95  # of intervals
FEWEST = 3  # seeds for an interval: two that happen to agree would make it as narrow as one likes


@dataclass(frozen=True)
class Difference:
    """A method less the baseline, over the seeds that both finished. In the figure's own unit."""

    mean: float
    margin: float | None  # half the width of the 95 % interval of the paired differences; None: too few seeds
    strict: float | None  # the same where the interval allows for the number of methods that are compared
    seeds: int

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.margin is not None and abs(self.mean) > self.margin

    @property
    def strictly_certain(self) -> bool:
        """Whether it still does if the number of methods is allowed for."""
        return self.strict is not None and abs(self.mean) > self.strict


@dataclass(frozen=True)
class Standing:
    """One method in the order of a comparison."""

    method: str
    values: Mapping[int, float]  # by seed; empty: the method has no such figure, or no run finished
    over: Difference | None  # over the baseline; None: it is the baseline, there is none, or they share no seed
    best: bool  # whether its mean is the best, among two or more methods

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None without a value."""
        return statistics.mean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """The standard deviation over seeds; None with fewer than two."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


def margin(differences: Sequence[float], level: float = LEVEL) -> float | None:
    """Half the width of the t interval of the mean of paired differences; None with fewer than three.

    >>> round(margin([1.0, 2.0, 3.0]), 3)  # 4.303 (t, 2 degrees of freedom) * 1 / sqrt(3)
    2.484
    """
    if len(differences) < FEWEST:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return float(stats.t.ppf(0.5 + level / 2, len(differences) - 1)) * error


def rank(values: Mapping[str, Mapping[int, float]], figure: Figure, baseline: str | None) -> list[Standing]:
    """The methods, best first; those without a value last. `values` are by method and seed."""
    others = sum(bool(of) for name, of in values.items() if name != baseline)
    sign = -1 if figure.better == "higher" else 1
    means = {name: statistics.mean(of.values()) for name, of in values.items() if of}
    top = min(means.values(), key=lambda mean: sign * mean) if len(means) > 1 else None

    def over(name: str) -> Difference | None:
        if baseline is None or name == baseline:
            return None
        base = values.get(baseline, {})
        differences = [value - base[seed] for seed, value in values[name].items() if seed in base]
        if not differences:
            return None
        level = 1 - (1 - LEVEL) / max(others, 1)
        return Difference(
            statistics.mean(differences), margin(differences), margin(differences, level), len(differences)
        )

    order = sorted(values, key=lambda name: (name not in means, sign * means.get(name, 0.0)))
    return [Standing(name, values[name], over(name), means.get(name) == top is not None) for name in order]


def common_figure(metrics: Mapping[str, Sequence[Metrics]], baseline: str | None, goal: str | None = None) -> Figure:
    """The figure to order methods by: one that the baseline has, so that all are compared on the same samples.

    `metrics` are the last evaluations of each method. Without a baseline it is what most methods lead with. If the
    samples are balanced with one seed only, they count as not balanced.
    """
    chosen = metrics.get(baseline or "") or [one for every in metrics.values() for one in every]
    leading = [figure for one in chosen if (figure := leading_figure(one, goal)) is not None]
    if not leading:
        return FIGURES["global"]
    often = Counter(figure.key for figure in leading)
    return FIGURES[max(often, key=lambda key: (key.endswith("balanced"), often[key]))]


def baseline_of(methods: Iterable[str]) -> str | None:
    """The method that others are compared with: FedAvg as it is, else with settings of its own; None if absent."""
    names = [text for text in methods if text.partition(":")[0] == BASELINE]
    return BASELINE if BASELINE in names else names[0] if names else None


def finding(standings: Sequence[Standing], figure: Figure, baseline: str | None) -> str:
    """What the comparison found, in a sentence or two; "" if there is nothing to compare."""
    ranked = [standing for standing in standings if standing.mean is not None]
    if len(ranked) < 2:
        return ""
    what = f"{figure.measure or figure.words}"
    where = figure.words.partition(":")[0]
    if baseline is None or not any(standing.over for standing in ranked):
        shown = f"{figure.text(ranked[0].mean)} against {figure.text(ranked[1].mean)} of {ranked[1].method}"
        return (
            f"{ranked[0].method} has the best {what} ({where}): {shown}. Without {BASELINE} among the methods there is "
            "no interval; add it for one."
        )
    first = next(standing for standing in ranked if standing.method != baseline)
    assert first.over is not None
    gap = gap_text(first.over, figure)
    over_seeds = f"over {first.over.seeds} seeds" if first.over.seeds > 1 else "with one seed"
    better = first.over.mean > 0 if figure.better == "higher" else first.over.mean < 0
    several = len(ranked) > 2
    lead = f"{first.method}, the best of the {len(ranked) - 1} other methods," if several else first.method
    if first.over.margin is None:
        side = "ahead of" if better else "behind" if first.over.mean else "level with"
        return (
            f"{lead} ends {side} {baseline} by {gap} of {what} ({where}) {over_seeds}. Fewer than {FEWEST} seeds "
            "cannot tell a difference from luck: compare with more, as in --seeds 0-4."
        )
    if first.over.strictly_certain and better:
        return f"{lead} is ahead of {baseline} by {gap} of {what} ({where}) {over_seeds}."
    if first.over.certain and better:
        return (
            f"{lead} ends ahead of {baseline} by {gap} of {what} ({where}) {over_seeds}, but that is not enough for "
            f"the best of {len(ranked) - 1}: one of several methods looks best by chance. More seeds would tell."
        )
    if first.over.strictly_certain:
        return f"{lead} is behind {baseline} by {gap} of {what} ({where}) {over_seeds}."
    return (
        f"{lead} and {baseline} cannot be told apart by their {what} ({where}) {over_seeds}: they differ by {gap}, "
        "and the interval includes 0."
    )


def gap_text(over: Difference, figure: Figure) -> str:
    """The size of a difference, with its margin: `2.1 ± 0.8 points`."""
    scale = 100 if figure.unit == "%" else 1
    unit = "points" if figure.unit == "%" else figure.unit
    spread = f" ± {_short(scale * over.margin)}" if over.margin is not None else ""
    return f"{_short(scale * abs(over.mean))}{spread} {unit}".strip()


def over_text(over: Difference | None, figure: Figure) -> str:
    """A difference for a table, with its sign and margin: `+2.10 ±0.80`; "-" for None."""
    if over is None:
        return "-"
    scale = 100 if figure.unit == "%" else 1
    spread = f" ±{scale * over.margin:.2f}" if over.margin is not None else ""
    return f"{scale * over.mean:+.2f}{spread}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
