"""Whether a run has converged: a method's lead over one that has not only shows that it starts faster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NEAR_CHANCE = 0.2  # of the way from chance to 100 %: a baseline below it only tells who starts faster
STILL_RISING = 0.02  # of accuracy, from one quarter of the evaluations to the last
LAST = 5  # evaluations of the mean that is shown beside the last round


def unsettled_curve(
    curve: Sequence[float], classes: int, *, may_rise: bool = False, chance: float | None = None
) -> str:
    """Why a run has not converged, in words that follow its name; "" if it has.

    `curve` holds the accuracies (0 to 1) of its evaluations, `classes` how many classes there are. A run has converged
    if it ends well above chance and its accuracy no longer rises. `may_rise` leaves out the second condition: for a
    run of a published protocol, whose length is part of the claim. `chance` is what guessing has by the curve's figure;
    None is one in `classes`.

    >>> unsettled_curve([0.3, 0.5, 0.6, 0.601], classes=10)
    ''
    >>> unsettled_curve([0.1, 0.2, 0.4, 0.6], classes=10)
    'still rises by 20.0 points over the last quarter of its evaluations'
    >>> unsettled_curve([0.1, 0.1, 0.12, 0.12], classes=10)
    'ends at 12.0 %, near chance (10 %)'
    """
    if len(curve) < 4:
        return "has too few evaluations to see whether its curve is flat"
    chance = 1 / max(1, classes) if chance is None else chance
    if curve[-1] < chance + NEAR_CHANCE * (1 - chance):
        return f"ends at {100 * curve[-1]:.1f} %, near chance ({100 * chance:.0f} %)"
    quarter = max(1, len(curve) // 4)
    rise = statistics.mean(curve[-quarter:]) - statistics.mean(curve[-2 * quarter : -quarter])
    if rise > STILL_RISING and not may_rise:
        return f"still rises by {100 * rise:.1f} points over the last quarter of its evaluations"
    return ""


def last_mean(values: Sequence[float]) -> float:
    """The mean of the last five values, or of all if there are fewer."""
    return statistics.mean(values[-LAST:])
