"""Whole numbers that say how a model predicted a set of samples. They add up exactly over clients, workers and sites.

Three tables are counted, and kept sparse (only what is not 0), so a client's are never larger than its predictions:

    confusion     by true and predicted class
    histogram     by class, bin of the class's score (see bins.py), and whether the sample is of that class (one versus
                  rest)
    calibration   by bin of the predicted class's probability: samples, correct ones, and their probabilities' sum

The areas under the ROC and the precision-recall curve come from the histogram, see areas.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedskew.evaluation.areas import Sparse, area_errors, areas, over_classes
from fedskew.evaluation.bins import BINS, FloatArray, IntArray, Placed, Predictions, place

LEVELS = 15  # bins of the predicted class's probability
ONE = 1 << 24  # a probability of 1: probabilities are added as whole numbers, so that the order does not matter


@dataclass(frozen=True, eq=False)
class Counts:
    """The counted predictions of one model on a set of samples."""

    classes: int
    cells: Sparse  # place: true class * classes + predicted class
    scores: Sparse  # place: (class * BINS + bin) * 2 + (1 if the sample is of this class, else 0)
    calibration: IntArray  # [3, LEVELS]: samples, correct samples, sum of probabilities times ONE

    @classmethod
    def of(cls, made: Predictions) -> Counts:
        """Count predictions."""
        return Sums(made.log_p.shape[1]).add_placed(place(made)).counts()

    @classmethod
    def sum(cls, items: Iterable[Counts], classes: int) -> Counts:
        """The counts of all samples together."""
        sums = Sums(classes)
        for item in items:
            sums.add(item)
        return sums.counts()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and all(map(np.array_equal, self.arrays, other.arrays))

    __hash__ = None  # type: ignore[assignment]

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """The five arrays that the counts consist of."""
        return (*self.cells, *self.scores, self.calibration)

    @property
    def samples(self) -> int:
        return int(self.cells[1].sum())

    @cached_property
    def confusion(self) -> IntArray:
        """How many samples of each class (row) were predicted as each class (column).  # [classes, classes]"""
        table = np.zeros(self.classes * self.classes, np.int64)
        table[self.cells[0]] = self.cells[1]
        return table.reshape(self.classes, self.classes)

    @cached_property
    def by_class(self) -> tuple[list[int], list[int], list[int]]:
        """By class: the samples, those predicted as it, and those predicted right."""
        confusion = self.confusion
        return confusion.sum(axis=1).tolist(), confusion.sum(axis=0).tolist(), confusion.diagonal().tolist()

    @cached_property
    def ece(self) -> float:
        """Expected calibration error over 15 equal bins: mean |accuracy - mean probability|, weighted by samples."""
        _, correct, chance = self.calibration
        return float(np.abs(correct - chance / ONE).sum() / max(self.samples, 1))

    @cached_property
    def auroc(self) -> float | None:
        """Area under the ROC curve: with two classes that of class 1, else the mean over classes, one versus rest."""
        return over_classes(self.areas[0])

    @cached_property
    def auprc(self) -> float | None:
        """Area under the precision-recall curve (average precision), over classes as `auroc`."""
        return over_classes(self.areas[1])

    @property
    def auroc_error(self) -> float | None:
        """By how much `auroc` may be off because samples are compared by bins, at most."""
        return over_classes(area_errors(self.scores, self.classes)[0])

    @property
    def auprc_error(self) -> float | None:
        """By how much `auprc` may be off because samples are compared by bins, at most."""
        return over_classes(area_errors(self.scores, self.classes)[1])

    @cached_property
    def areas(self) -> tuple[FloatArray, FloatArray]:
        """See `areas`."""
        return areas(self.scores, self.classes)


class Sums:
    """Counts that are being added up: whole tables instead of what is not 0 in them."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.cells, self.scores = np.zeros(classes * classes, np.int64), np.zeros(2 * BINS * classes, np.int64)
        self.calibration = np.zeros((3, LEVELS), np.int64)

    def add(self, counts: Counts) -> None:
        """Add the counts of some samples."""
        self.cells[counts.cells[0]] += counts.cells[1]
        self.scores[counts.scores[0]] += counts.scores[1]
        self.calibration += counts.calibration

    def add_placed(self, made: Placed) -> Sums:
        """Add predictions; returns itself."""
        classes = self.classes
        levels = np.minimum((made.chance * LEVELS).astype(np.int64), LEVELS - 1)
        right = made.predicted == made.y
        self.cells += np.bincount(made.y * classes + made.predicted, minlength=classes * classes)
        places = made.keys + np.arange(0, 2 * BINS * classes, 2 * BINS)
        self.scores += np.bincount(places.reshape(-1), minlength=2 * BINS * classes)
        self.calibration[0] += np.bincount(levels, minlength=LEVELS)
        self.calibration[1] += np.bincount(levels[right], minlength=LEVELS)
        self.calibration[2] += np.bincount(levels, np.rint(made.chance * ONE), LEVELS).astype(np.int64)
        return self

    def counts(self) -> Counts:
        """The sum."""
        return Counts(self.classes, sparse(self.cells), sparse(self.scores), self.calibration.copy())


def set_areas(items: Sequence[Counts]) -> None:
    """Compute the areas of several counts in one go, which is faster; the items keep them."""
    items = [item for item in items if "areas" not in item.__dict__]
    if not items:
        return
    groups = np.cumsum([0, *(item.classes for item in items)])
    at = np.concatenate([item.scores[0] + 2 * BINS * g for item, g in zip(items, groups, strict=False)])
    found = areas((at, np.concatenate([item.scores[1] for item in items])), int(groups[-1]))
    for item, start in zip(items, groups, strict=False):
        item.__dict__["areas"] = tuple(area[start : start + item.classes] for area in found)


def sparse(table: IntArray) -> Sparse:
    """What is not 0 in a table."""
    at = (table != 0).nonzero()[0]  # four times as fast as without the comparison
    return at, table[at]
