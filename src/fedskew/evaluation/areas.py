"""Areas under the ROC curve and average precisions, from tables of scores in bins (see bins.py).

Samples of one bin count as tied, so a model that gives all samples the same score has an area under the ROC curve of
0.5. By how much an area may be off because of this is known, see `area_errors`: at most half the share of pairs (one
sample of the class, one of the others) that fall into one bin; of average precision, the largest change within bins.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedskew.evaluation.bins import BINS, FloatArray, IntArray, Placed

Sparse = tuple[IntArray, IntArray]  # places in a table, in order, and the count at each
LAST = np.int16(2 * BINS)  # a key beyond those of `Placed`


class Curves(NamedTuple):
    """What areas are computed from: for each bin that has samples of its class, those in it, above it and below it.

    A group is a class, or a class of one of several models; its number stands where `Counts.scores` has the class.
    """

    group: IntArray  # of each bin
    own: IntArray  # samples of the class in the bin
    rest: IntArray  # other samples in the bin
    own_above: FloatArray  # samples of the class in the bin or above
    rest_above: FloatArray  # other samples in the bin or above
    owned: FloatArray  # by group: samples of the class
    others: FloatArray  # by group: other samples

    @classmethod
    def of(cls, scores: Sparse, groups: int) -> Curves:
        """From a table of scores."""
        at, n = scores
        key = at >> 1
        first = run_starts(key)  # the first entry of each bin
        own = np.add.reduceat(n * (at & 1), first) if len(at) else n
        rest = np.add.reduceat(n, first) - own if len(at) else n
        group = key[first] // BINS
        owned: Any = np.bincount(group, own, groups)
        others: Any = np.bincount(group, rest, groups)
        used = own.nonzero()[0]
        at_or_below = own.cumsum()[used], rest.cumsum()[used]  # of this group and those before
        group, own, rest = group[used], own[used], rest[used]
        own_above = owned.cumsum()[group] - at_or_below[0] + own
        rest_above = others.cumsum()[group] - at_or_below[1] + rest
        return cls(group, own, rest, own_above, rest_above, owned, others)

    @property
    def pairs(self) -> FloatArray:
        """By group: pairs of a sample of the class and another; NaN if there is none."""
        pairs = self.owned * self.others * 1.0  # without any samples numpy counts in whole numbers
        pairs[pairs == 0] = np.nan
        return pairs

    def sums(self, values: npt.NDArray[Any]) -> FloatArray:
        """By group: the sum over its bins."""
        by_group: Any = np.bincount(self.group, values, len(self.owned))
        return np.asarray(by_group, np.float64)


def run_starts(values: npt.NDArray[Any]) -> IntArray:
    """Where each new value begins in sorted values."""
    new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new.nonzero()[0]


def areas(scores: Sparse, groups: int) -> tuple[FloatArray, FloatArray]:
    """By group (see `Curves`): area under the ROC curve, and average precision.

    NaN for a group without samples of the class, or without others.
    """
    c = Curves.of(scores, groups)
    pairs = c.pairs
    rest_below = c.others[c.group] - c.rest_above
    precision = c.own_above / (c.own_above + c.rest_above)
    owned = np.where(np.isnan(pairs), np.nan, c.owned)
    return c.sums(c.own * (rest_below + c.rest / 2)) / pairs, c.sums(c.own * precision) / owned


def area_errors(scores: Sparse, groups: int) -> tuple[FloatArray, FloatArray]:
    """By how much each of the `areas` may be off."""
    c = Curves.of(scores, groups)
    pairs, before = c.pairs, c.own_above - c.own
    # a bin's precision; had it no ties, at worst its first sample of the class came last, at best all came first
    precision = c.own_above / (c.own_above + c.rest_above)
    worst, best = (before + 1) / (before + 1 + c.rest_above), c.own_above / (c.own_above + c.rest_above - c.rest)
    slack = np.maximum(precision - worst, best - precision)
    owned = np.where(np.isnan(pairs), np.nan, c.owned)
    return c.sums(c.own * c.rest / 2) / pairs, c.sums(c.own * slack) / owned


def part_aurocs(made: Placed, total: IntArray) -> list[float | None]:
    """The `Counts.auroc` of each of several parts, one after the other in `made`, in one go.

    `total` are the samples by part and class. The samples of a part are ordered by the score of each class, once with
    samples of the class last among ties and once with them first. Half the sum of their places in both orders, less
    what samples of the class count for each other, is the number of pairs in the right order, ties as half.
    """
    sizes = total.sum(axis=1, keepdims=True)
    starts = sizes.cumsum()[:, None] - sizes
    pairs = total * (sizes - total)
    if total.shape[1] == 2:
        pairs[:, 0] = 0  # see `over_classes`
    useful, twice = pairs > 0, np.zeros_like(pairs)
    for parts in _of_like_size(sizes[:, 0]):
        part, label = np.nonzero(useful[parts])
        part = parts[part]
        within = np.arange(sizes[parts].max())
        rows = np.minimum(starts[part] + within, len(made.y) - 1)
        keys = made.keys[rows, label[:, None]]  # [useful classes of all parts, places in the largest part]
        keys[within >= sizes[part]] = LAST
        for order, own in (keys ^ 1, 0), (keys, 1):  # the last bit says whether a sample is of the class
            order.sort(axis=1)
            twice[part, label] += (((order & 1) == own) * within).sum(axis=1)
    areas = (twice - total * (total - 1)) / (2 * np.maximum(pairs, 1))
    return over_classes_of_each(np.where(useful, areas, np.nan))


def _of_like_size(sizes: IntArray) -> list[IntArray]:
    """The numbers of the parts, together if that wastes little, else by size: 2^k to 2^(k + 1) - 1 samples."""
    everyone = np.arange(len(sizes))
    if sizes.max(initial=0) * len(sizes) <= 4 * sizes.sum():
        return [everyone]
    power = np.frexp(sizes)[1]
    return [everyone[power == k] for k in np.unique(power)]


def over_classes(values: FloatArray) -> float | None:
    """Class 1 of two classes, or the mean over classes that have a value; None if none has."""
    chosen = values[1:] if len(values) == 2 else values
    known = chosen[~np.isnan(chosen)]
    return float(known.mean()) if len(known) else None


class Known(NamedTuple):
    """Which values are known, in rows of one for each class, and what their means need that follows from it."""

    mask: npt.NDArray[np.bool_]
    number: IntArray  # of values of each row
    # rows with more than seven values, by how many k: k, the rows, the values' places in the table  # [rows, k]
    many: list[tuple[int, IntArray, IntArray]]

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> Known:
        """From what is known."""
        number = mask.sum(axis=1)
        rows_of = {k: (number == k).nonzero()[0] for k in sorted(set(number.tolist())) if k > 7}
        places = np.arange(mask.size).reshape(mask.shape)
        return cls(mask, number, [(k, r, places[r][mask[r]].reshape(-1, k)) for k, r in rows_of.items()])


def over_classes_of_each(values: FloatArray, known: Known | None = None) -> list[float | None]:
    """`over_classes` of every row; the same bits. `known`: which values are not NaN, if that is known already."""
    if values.shape[1] == 2:
        return [None if math.isnan(value) else value for value in values[:, 1].tolist()]
    known = known or Known.of(~np.isnan(values))
    # up to seven values numpy adds one after the other, as here
    means = np.where(known.mask, values, 0.0).cumsum(axis=1)[:, -1] / np.maximum(known.number, 1)
    for k, rows, places in known.many:
        means[rows] = values.take(places).sum(axis=1) / k
    return [mean if n else None for mean, n in zip(means.tolist(), known.number.tolist(), strict=True)]
