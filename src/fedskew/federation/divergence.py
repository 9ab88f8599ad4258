"""When a run has diverged: a loss is no longer finite, or the model has fallen back to chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedskew.evaluation.figures import headline, percent
from fedskew.evaluation.metrics import Metrics
from fedskew.federation.protocol import Record

ABOVE = 0.2  # of the way from chance to 100 %: an accuracy clearly above chance
AT = 0.02  # of that way: an accuracy at chance
PATIENCE = 5  # evaluations in a row at chance after which a run counts as diverged

Point = tuple[int, float]  # (round, counted from 1; accuracy)


class DivergenceCheck:
    """Says after each round of a run whether it diverged.

    A run diverged if its training loss or an evaluation loss is not finite, or if its accuracy is at chance in the
    last five evaluations after it was clearly above. Accuracy that never left chance is slow, not diverged.

    A round costs the same however many there were before: of older evaluations only the best is kept.
    """

    def __init__(self) -> None:
        self.read = 0  # records that are in `recent` or `best`
        self.recent: list[Point] = []  # the last evaluations
        self.best: list[Point] = []  # the best of those before, the first of equals; []: there are none

    def reason(self, records: Sequence[Record], record: Record) -> str:
        """Why `record` shows that the run diverged, as a sentence without its end; "" if it does not.

        `records` are those of all rounds before. From call to call they only grow, and all but the last stay as they
        are: figures of clients may arrive a round late.
        """
        for older in records[self.read : -1]:
            self.recent += _point(older)
            if len(self.recent) > PATIENCE:
                self.best = [_best([*self.best, self.recent.pop(0)])]
        self.read = max(self.read, len(records) - 1)
        what = (
            "training" if _broken(record.training.get("loss", 0.0)) else "evaluation" if _lost(record.metrics) else ""
        )
        if what:
            return f"the run diverged in round {record.round + 1}: the {what} loss is not finite"
        if record.metrics is None or not record.metrics.classes:
            return ""
        chance = 1 / record.metrics.classes
        curve = [*self.recent, *(p for r in records[-1:] for p in _point(r)), *_point(record)]
        before, recent = [*self.best, *curve[:-PATIENCE]], curve[-PATIENCE:]
        if not before or any(a > chance + AT * (1 - chance) for _, a in recent):
            return ""
        best = _best(before)
        if best[1] < chance + ABOVE * (1 - chance):
            return ""
        return (
            f"the run diverged in round {recent[0][0]}: its accuracy is {percent(recent[-1][1])} %, which is chance, "
            f"in {PATIENCE} evaluations, after {percent(best[1])} % in round {best[0]}"
        )


def _point(record: Record) -> list[Point]:
    """The record's point of the curve; none if it was not evaluated."""
    accuracy = headline(record.metrics)
    return [] if accuracy is None else [(record.round + 1, accuracy)]


def _best(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point[1])


def _broken(value: float | None) -> bool:
    """Whether a loss is not finite; such a loss is null in a file, and None when read back."""
    return value is None or not math.isfinite(value)


def _lost(metrics: Metrics | None) -> bool:
    """Whether a loss of the global model or over all clients is not finite."""
    if metrics is None:
        return False
    clients = metrics.clients
    models = [metrics.global_, *((clients.global_, clients.personal) if clients else ())]
    return any(_broken(model.loss) for model in models if model is not None)
