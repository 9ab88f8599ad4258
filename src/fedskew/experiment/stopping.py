"""Early stopping: a run ends when a figure on validation data has not improved for some evaluations.

The decision follows from the records alone, so a resumed run decides as one that was never interrupted. The model is
that of the last round: to pick the best round by the validation data would be another choice made on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.evaluation.figures import goal_figure
from fedskew.experiment.config import Stop
from fedskew.federation.protocol import Record


def why_stop(records: Sequence[Record], stop: Stop) -> str:
    """Why the run ends after these records, in words; "" if it goes on."""
    if not stop.patience:
        return ""
    values = [(r.round, r.validation) for r in records if r.validation is not None and r.stage == "train"]
    if not values:
        return ""
    figure = goal_figure(stop.figure or "accuracy")
    sign = 1 if figure.better == "higher" else -1
    delta = stop.min_delta / (100 if figure.unit == "%" else 1)
    best_at, best = 0, float("-inf")
    for position, (_, value) in enumerate(values):
        if sign * value > best + delta:  # false for NaN
            best_at, best = position, sign * value
    if len(values) - 1 - best_at < stop.patience:
        return ""
    unit = f" {figure.unit}".rstrip()
    return (
        f"{stop.figure or 'the leading figure'} on validation data has not improved for {stop.patience} evaluations; "
        f"its best is {figure.text(sign * best)}{unit} in round {values[best_at][0] + 1}"
    )
