"""Metrics over clients: of their pooled predictions, and how far the clients differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedskew.evaluation.bins import IntArray
from fedskew.evaluation.metrics import ClientMetrics, Over, Spread
from fedskew.evaluation.scores import detail, per_class
from fedskew.evaluation.tally import Tally


def over_clients(tally: Tally) -> ClientMetrics | None:
    """Metrics over clients that all have test samples; None if there is no client."""
    if not tally.losses:
        return None
    tables = tally.tables()
    pooled = tally.pooled(tables)
    correct, total = (table.sum(axis=1) for table in tables)
    accuracy = over((correct / total).tolist())
    assert accuracy is not None
    return ClientMetrics(
        mean=accuracy.mean,
        weighted=pooled.accuracy,
        std=accuracy.std,
        worst_decile=accuracy.worst_decile,
        loss=pooled.loss / pooled.samples,
        per_class=per_class(pooled),
        clients=len(tally.losses),
        over=spread(tally, *tables) if tally.counts is not None else Spread(),
        **(detail(tally.counts) if tally.counts is not None else {}),
    )


def spread(tally: Tally, correct: IntArray, total: IntArray) -> Spread:
    """The figures of `class_figures` and the areas over clients; computed for all clients at once."""
    parts = np.concatenate([correct, 2 * correct])
    wholes = np.concatenate([total, total + np.array(tally.predicted)])
    # classes that do not occur have 0 of 0: they add nothing, and are not among those that the mean is over
    means = ((parts / np.maximum(wholes, 1)).sum(axis=1) / (wholes > 0).sum(axis=1)).tolist()
    return Spread(
        balanced_accuracy=over(means[: len(total)]),
        macro_f1=over(means[len(total) :]),
        auroc=over([auroc for auroc in tally.aurocs if auroc is not None]),
    )


def over(values: Sequence[float]) -> Over | None:
    """One figure's mean, standard deviation and worst tenth; None if there is no value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    worst = sorted(values)[: math.ceil(len(values) / 10)]
    return Over(
        mean=mean,
        std=math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)),
        worst_decile=sum(worst) / len(worst),
        clients=len(values),
    )
