"""Whole numbers that say how a model predicted a set of samples. They add up exactly over clients, workers and sites.

Three tables are counted, and kept sparse (only what is not 0), so a client's are never larger than its predictions:

    confusion     by true and predicted class
    histogram     by class, bin of the class's score, and whether the sample is of that class (one versus rest)
    calibration   by bin of the predicted class's probability: samples, correct ones, and their probabilities' sum

A score is the logit of a class's probability, s = log(p / (1 - p)). Its bins have width 1/64 in 4 asinh(s / 4), which
is s itself near 0 and grows slower further out: two samples share a bin if their odds differ by less than 2 % where p
is about 1/2, by less than 7 % where p is 1e-7. Scores from -100 to 17 have bins; float32 cannot tell larger ones apart.

Samples of one bin count as tied, so a model that gives all samples the same score has an area under the ROC curve of
0.5. By how much an area may be off because of this is known: `auroc_error` is half the share of pairs (one sample of
the class, one of the others) that fall into one bin, `auprc_error` the largest change of precision within bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Sparse = tuple[IntArray, IntArray]  # places in a table, in order, and the count at each

LOW, HIGH = -100.0, 17.0  # logits beyond these share a bin
BEND = 4.0  # the logit from which on bins become wider
PER_UNIT = 64  # bins per unit near 0
FIRST = math.floor(PER_UNIT * BEND * math.asinh(LOW / BEND))
BINS = math.floor(PER_UNIT * BEND * math.asinh(HIGH / BEND)) - FIRST + 1
LEVELS = 15  # bins of the predicted class's probability
ONE = 1 << 24  # a probability of 1: probabilities are added as whole numbers, so that the order does not matter


class Predictions(NamedTuple):
    """What a model said about some samples, before it is counted."""

    log_p: Tensor  # [n, classes], float32
    y: Tensor  # [n], the true classes
    predicted: Tensor  # [n]

    @classmethod
    def cat(cls, parts: Sequence[Predictions]) -> Predictions:
        """All of them together."""
        return parts[0] if len(parts) == 1 else cls(*(torch.cat(list(tensors)) for tensors in zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Counts:
    """The counted predictions of one model on a set of samples."""

    classes: int
    cells: Sparse  # place: true class * classes + predicted class
    scores: Sparse  # place: (class * BINS + bin) * 2 + (1 if the sample is of this class, else 0)
    calibration: IntArray  # [3, LEVELS]: samples, correct samples, sum of probabilities times ONE

    @classmethod
    def of(cls, made: Predictions, places: IntArray | None = None) -> Counts:
        """Count predictions. `places` are their `score_places`, if these are known already."""
        places = score_places(made) if places is None else places
        classes, y, predicted = made.log_p.shape[1], made.y.numpy(), made.predicted.numpy()
        chance = made.log_p.amax(dim=1).exp().nan_to_num_(0.0).numpy().astype(np.float64)
        levels = np.minimum((chance * LEVELS).astype(np.int64), LEVELS - 1)
        weights = None, predicted == y, np.rint(chance * ONE)
        return cls(
            classes,
            _sparse(np.bincount(y * classes + predicted, minlength=classes * classes)),
            _sparse(np.bincount(places.ravel(), minlength=2 * BINS * classes)),
            np.stack([np.bincount(levels, w, LEVELS) for w in weights]).astype(np.int64),
        )

    @classmethod
    def sum(cls, items: Iterable[Counts], classes: int) -> Counts:
        """The counts of all samples together."""
        cells, scores = np.zeros(classes * classes, np.int64), np.zeros(2 * BINS * classes, np.int64)
        calibration = np.zeros((3, LEVELS), np.int64)
        for item in items:
            cells[item.cells[0]] += item.cells[1]
            scores[item.scores[0]] += item.scores[1]
            calibration += item.calibration
        return cls(classes, _sparse(cells), _sparse(scores), calibration)

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

    @property
    def ece(self) -> float:
        """Expected calibration error over 15 equal bins: mean |accuracy - mean probability|, weighted by samples."""
        _, correct, chance = self.calibration
        return float(np.abs(correct - chance / ONE).sum() / max(self.samples, 1))

    @property
    def auroc(self) -> float | None:
        """Area under the ROC curve: with two classes that of class 1, else the mean over classes, one versus rest."""
        return over_classes(self.areas[0])

    @property
    def auprc(self) -> float | None:
        """Area under the precision-recall curve (average precision), over classes as `auroc`."""
        return over_classes(self.areas[1])

    @property
    def auroc_error(self) -> float | None:
        """By how much `auroc` may be off because samples are compared by bins, at most."""
        return over_classes(self.areas[2])

    @property
    def auprc_error(self) -> float | None:
        """By how much `auprc` may be off because samples are compared by bins, at most."""
        return over_classes(self.areas[3])

    @cached_property
    def areas(self) -> tuple[FloatArray, ...]:
        """See `areas`."""
        return areas(self.scores, self.classes)


def score_places(made: Predictions) -> IntArray:
    """The place of each score in the table of scores, see `Counts.scores`. NaN goes to the first bin. # [n, classes]"""
    log_p, y, _ = made
    logit = log_p - torch.log1p(-log_p.exp())
    logit.nan_to_num_(nan=LOW, posinf=HIGH, neginf=LOW).clamp_(LOW, HIGH)
    bins = logit.div_(BEND).asinh_().mul_(BEND * PER_UNIT).floor_().int().numpy().astype(np.int64)
    places: IntArray = 2 * ((bins - FIRST).clip(0, BINS - 1) + np.arange(log_p.shape[1]) * BINS)
    places[np.arange(len(y)), y.numpy()] += 1
    return places


def areas(scores: Sparse, groups: int) -> tuple[FloatArray, ...]:
    """By group: area under the ROC curve, average precision, and by how much each of these may be off.

    A group is a class, or a class of one of several clients; its number stands where `Counts.scores` has the class.
    NaN for a group without samples of the class, or without others.
    """
    at, n = scores
    if not len(at):
        nothing = np.full(groups, np.nan)
        return (nothing,) * 4
    key = at >> 1
    first = np.flatnonzero(np.diff(key, prepend=-1))  # the first entry of each bin
    positive = n * (at & 1)
    own, rest = np.add.reduceat(positive, first), np.add.reduceat(n - positive, first)
    group = key[first] // BINS
    owned, others = (np.bincount(group, w, groups) for w in (own, rest))
    # samples at or above a bin, within its group: those up to the group's end less those before the bin
    own_above = owned.cumsum()[group] - own.cumsum() + own
    rest_above = others.cumsum()[group] - rest.cumsum() + rest
    rest_below = others[group] - rest_above
    with np.errstate(invalid="ignore", divide="ignore"):
        pairs = np.where((owned > 0) & (others > 0), owned * others, np.nan)
        roc = np.bincount(group, own * (rest_below + rest / 2), groups) / pairs
        error = np.bincount(group, own * rest / 2, groups) / pairs
        # a bin's precision; had it no ties, at worst its first sample of the class came last, at best all came first
        precision, before = own_above / (own_above + rest_above), own_above - own
        worst, best = (before + 1) / (before + 1 + rest_above), own_above / (own_above + rest_above - rest)
        slack = np.where(own > 0, np.maximum(precision - worst, best - precision), 0)
        by_group = [np.bincount(group, own * w, groups) / owned + 0 * pairs for w in (precision, slack)]
        return roc, by_group[0], error, by_group[1]


def part_aurocs(places: IntArray, sizes: Sequence[int]) -> list[float | None]:
    """The `Counts.auroc` of each of several parts, of `sizes` samples each, in one go, from their `score_places`."""
    classes = places.shape[1]
    part = np.repeat(np.arange(len(sizes)), sizes)
    at, n = np.unique(places + (part * classes * BINS * 2)[:, None], return_counts=True)
    found = areas((at, n.astype(np.int64)), len(sizes) * classes)[0].reshape(len(sizes), classes)
    return [over_classes(row) for row in found]


def over_classes(values: FloatArray) -> float | None:
    """Class 1 of two classes, or the mean over classes that have a value; None if none has."""
    chosen = values[1:] if len(values) == 2 else values
    known = chosen[~np.isnan(chosen)]
    return float(known.mean()) if len(known) else None


def _sparse(table: npt.NDArray[Any]) -> Sparse:
    at = np.flatnonzero(table)
    return at, table[at]
