"""How skewed a partition is: the figures that papers report, from the table of clients x classes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.allotment import FloatArray, IntArray
from fedskew.data.split.partition import Partition


@dataclass(frozen=True, eq=False)
class Skew:
    """Figures of one partition. The global mix is that of all clients together, without the public set."""

    table: IntArray  # [clients, classes]
    sizes: IntArray  # [clients]
    classes: IntArray  # [clients], how many classes a client has
    entropy: FloatArray  # [clients], of its labels in nats: 0 is one class, log(C) equal classes
    distance: FloatArray  # [clients], total variation between its label mix and the global mix: 0 alike, 1 disjoint
    mean_entropy: float
    mean_distance: float
    gini: float  # of the sizes: 0 all equal, towards 1 one client has everything
    imbalance: float  # largest over smallest class, of the classes that have samples

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def class_table(partition: Partition, y: npt.NDArray[Any], classes: int | None = None) -> IntArray:
    """How many samples of each class each client has.  # [clients, classes]

    classes: the columns are 0..classes-1; None: the labels that occur in y.
    """
    if classes is None:
        values, y = np.unique(y, return_inverse=True)
        classes = len(values)
    rows = [np.bincount(y[samples], minlength=classes) for samples in partition.clients]
    return np.stack(rows).astype(np.int64)


def skew(partition: Partition, y: npt.NDArray[Any], classes: int | None = None) -> Skew:
    """The figures of a partition of samples with labels y. `classes` as in `class_table`.

    >>> y = np.array([0, 0, 1, 1])
    >>> figures = skew(Partition((np.array([0, 1]), np.array([2, 3])), np.empty(0, int)), y)
    >>> figures.table.tolist(), figures.mean_distance, figures.gini
    ([[2, 0], [0, 2]], 0.5, 0.0)
    """
    table = class_table(partition, y, classes)
    sizes, totals = table.sum(axis=1), table.sum(axis=0)
    mix = table / np.maximum(sizes, 1)[:, None]
    entropy = -(mix * np.log(np.where(mix > 0, mix, 1))).sum(axis=1)
    distance = np.abs(mix - totals / totals.sum()).sum(axis=1) / 2
    return Skew(
        table=table,
        sizes=sizes,
        classes=(table > 0).sum(axis=1),
        entropy=entropy,
        distance=distance,
        mean_entropy=float(entropy.mean()),
        mean_distance=float(distance.mean()),
        gini=gini_coefficient(sizes),
        imbalance=float(totals.max() / totals[totals > 0].min()),
    )


def gini_coefficient(sizes: IntArray) -> float:
    """Mean absolute difference of two sizes over twice their mean: sum_i (2i - N - 1) x_(i) / (N sum x)."""
    N = len(sizes)
    weights = 2 * np.arange(1, N + 1) - N - 1
    return float((weights * np.sort(sizes)).sum() / (N * sizes.sum()))
