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


def divergence(records: Sequence[Record]) -> str:
    """Why the last of a run's records shows that it diverged, as a sentence without its end; "" if it does not.

    A run diverged if its training loss or an evaluation loss is not finite, or if its accuracy is at chance in the
    last five evaluations after it was clearly above. Accuracy that never left chance is slow, not diverged.
    """
    last = records[-1]
    what = "training" if _broken(last.training.get("loss", 0.0)) else "evaluation" if _lost(last.metrics) else ""
    if what:
        return f"the run diverged in round {last.round + 1}: the {what} loss is not finite"
    if last.metrics is None or not last.metrics.classes:
        return ""
    chance = 1 / last.metrics.classes
    curve = [(r.round + 1, a) for r in records if (a := headline(r.metrics)) is not None]
    before, recent = curve[:-PATIENCE], curve[-PATIENCE:]
    best = max(before, key=lambda point: point[1], default=(0, 0.0))
    if best[1] < chance + ABOVE * (1 - chance) or any(a > chance + AT * (1 - chance) for _, a in recent):
        return ""
    return (
        f"the run diverged in round {recent[0][0]}: its accuracy is {percent(recent[-1][1])} %, which is chance, in "
        f"{PATIENCE} evaluations, after {percent(best[1])} % in round {best[0]}"
    )


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
