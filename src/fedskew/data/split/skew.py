"""How skewed a partition is: the figures that papers report, from the table of clients x classes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.allotment import FloatArray, IntArray
from fedskew.data.split.partition import Partition

MAX_CLIENTS = 100  # in one picture; of more clients every n-th is drawn


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
    imbalance: float  # imbalance factor: largest over smallest class, of the classes that have samples
    # means over clients that have samples; the distances are between a client's label mix and the global mix
    mean_hellinger: float  # Hellinger distance: 0 alike, 1 disjoint
    mean_jensen_shannon: float  # Jensen-Shannon distance to base 2 (the root of the divergence): 0 alike, 1 disjoint
    mean_effective: float  # effective classes, exp(entropy): 1 is one class, C equal classes
    empty: float  # share of (client, class) cells without a sample, of the classes that have samples

    def summary(self) -> dict[str, float]:
        """The figures of the whole partition, by the names that results and reports use."""
        return {
            "clients": len(self.sizes),
            "total_variation": self.mean_distance,
            "hellinger": self.mean_hellinger,
            "jensen_shannon": self.mean_jensen_shannon,
            "empty_cells": self.empty,
            "effective_classes": self.mean_effective,
            "size_gini": self.gini,
            "imbalance_factor": self.imbalance,
        }

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
    kept, overall = mix[sizes > 0], totals / totals.sum()
    hellinger = np.linalg.norm(np.sqrt(kept) - np.sqrt(overall), axis=1) / np.sqrt(2)
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
        mean_hellinger=float(hellinger.mean()),
        mean_jensen_shannon=float(jensen_shannon(kept, overall[None]).mean()),
        mean_effective=float(np.exp(entropy[sizes > 0]).mean()),
        empty=float((table[:, totals > 0] == 0).mean()),
    )


def jensen_shannon(p: FloatArray, q: FloatArray) -> FloatArray:
    """The Jensen-Shannon distance to base 2 between rows of p and q, which sum to 1.

    scipy has it too, but importing that takes as long as the first rounds of a small run.
    """
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(mix > 0, mix * np.log2(mix / middle), 0.0).sum(1) for mix in np.broadcast_arrays(p, q)]
    distance: FloatArray = np.sqrt(np.maximum((terms[0] + terms[1]) / 2, 0.0))
    return distance


def gini_coefficient(sizes: IntArray) -> float:
    """Mean absolute difference of two sizes over twice their mean: sum_i (2i - N - 1) x_(i) / (N sum x)."""
    N = len(sizes)
    weights = 2 * np.arange(1, N + 1) - N - 1
    return float((weights * np.sort(sizes)).sum() / (N * sizes.sum()))


def feature_skew(features: FloatArray, y: IntArray, clients: IntArray) -> float | None:
    """How much samples of one class differ between clients: the share of their variance that lies between clients.

    Features [n, d] of samples with labels y [n] at clients [n]. 0: a class looks the same at every client; 1: all its
    samples at one client are alike, but other clients' differ. The share is adjusted for the number of (client, class)
    cells, as the adjusted R^2 is, so that samples split at random give 0 on average. None if it cannot be computed.

    >>> x = np.array([[0.0], [0.0], [9.0], [9.0]])
    >>> feature_skew(x, np.array([0, 0, 0, 0]), np.array([0, 0, 1, 1]))
    1.0
    """
    cells, cell = np.unique(np.stack([y, clients]), axis=1, return_inverse=True)
    classes, label = np.unique(y, return_inverse=True)
    within, total = (_squares(features, groups.ravel()) for groups in (cell, label))
    free = len(y) - cells.shape[1]
    if free < 1 or total <= 0:
        return None
    return float(max(0.0, 1 - (within / free) / (total / (len(y) - len(classes)))))


def _squares(features: FloatArray, groups: IntArray) -> float:
    """Sum of squared distances to the mean of each sample's group."""
    counts = np.bincount(groups)
    means = np.zeros((len(counts), features.shape[1]))
    np.add.at(means, groups, features)
    return float(np.square(features - (means / counts[:, None])[groups]).sum())
