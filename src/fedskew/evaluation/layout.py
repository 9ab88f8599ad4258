"""What counting a few predictions needs to know and follows from the labels: the same in every round, so kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.evaluation.areas import Known
from fedskew.evaluation.bins import BINS, FloatArray, IntArray
from fedskew.evaluation.counts import LEVELS

PAIRS = 40_000  # at most so many pairs of samples are compared one by one; more are sorted, see `part_aurocs`


@dataclass(frozen=True)
class Groups:
    """The classes of each model, or of each part: groups of samples that are of the class, or are not."""

    owned: IntArray  # of each group: samples of the class
    divisor: FloatArray  # of each group: the same; NaN where there are no samples of the class, or no others
    pairs: FloatArray  # of each group: pairs of a sample of the class and another; NaN where there is none

    @classmethod
    def of(cls, owned: IntArray, size: IntArray) -> Groups:
        """`owned` and `size` are each group's samples of the class, and all it has."""
        pairs = (owned * (size - owned)).astype(np.float64)
        pairs[pairs == 0] = np.nan
        return cls(owned, np.where(pairs > 0, owned, np.nan), pairs)


@dataclass(frozen=True)
class Layout:
    """Where things are, and how many, for samples of one model after the other; the last are also parts of clients.

    An entry is a class's score of one sample. Once the entries of each model are in order, those of a class are
    neighbours: one of each of the model's samples.
    """

    cells: IntArray  # of each sample: the first place of its model and class in the tables of confusions
    levels: IntArray  # of each sample: where its model's table of calibration begins
    rows: IntArray  # of each sample: its first entry
    tables: npt.NDArray[Any]  # of each entry: the first place of its class in its model's table of scores; + 1 if own
    bounds: list[int]  # entries before each model, and in all
    group: IntArray  # of each place of the entries in order
    begin: IntArray  # of each group: its first place
    end: IntArray  # of each group: the place after its last
    owned_until: IntArray  # of each group: samples of their class in it and the groups before
    before: IntArray  # of each group: owned * (2 * begin + owned), see `areas_of_models`
    models: Groups
    parts: IntArray  # of each sample of a part: where its part begins in tables of parts by class
    true: IntArray  # of each sample of a part: the place of its part and class
    clients: Groups  # of the parts
    known: Known  # which areas exist: under the ROC curve and of precision of each model, then of each part
    duels: Duels | None  # None: too many


@dataclass(frozen=True)
class Duels:
    """The pairs of a sample and one of another class of the same part, which areas of parts come from."""

    own: IntArray  # of each pair: the entry of the sample's class
    other: IntArray  # of each pair: the other sample's entry of that class
    group: IntArray  # of each pair: the part and class


@lru_cache(maxsize=8)
def layout(classes: int, models: tuple[int, ...], parts: tuple[int, ...], labels: bytes) -> Layout:
    """The layout of models and parts of these sizes; `labels` are those of all samples, as int64."""
    y = np.frombuffer(labels, np.int64)
    model = np.repeat(np.arange(len(models)), models)
    cells = (model * classes + y) * classes
    owned = np.bincount(model * classes + y, minlength=len(models) * classes)
    size = np.repeat(np.array(models, np.int64), classes)
    end = size.cumsum()
    rows = np.arange(len(y)) * classes
    # numbers of 16 bits are sorted by their digits, in a fifth of the time
    kind = np.uint16 if 2 * BINS * classes <= 1 << 16 else np.int32
    tables = np.tile((2 * BINS * np.arange(classes)).astype(kind), len(y))
    tables[rows + y] += 1
    part = np.repeat(np.arange(len(parts)), parts)
    first = len(y) - len(part)
    true = part * classes + y[first:]
    in_part = np.bincount(true, minlength=len(parts) * classes)
    of_models = Groups.of(owned, size)
    of_parts = Groups.of(in_part, np.repeat(np.array(parts, np.int64), classes))
    exists = [(~np.isnan(groups.pairs)).reshape(-1, classes) for groups in (of_models, of_parts)]
    return Layout(
        cells=cells,
        levels=model * LEVELS,
        rows=rows,
        tables=tables,
        bounds=(np.array([0, *models]).cumsum() * classes).tolist(),
        group=np.repeat(np.arange(len(size)), size),
        begin=end - size,
        end=end,
        owned_until=owned.cumsum(),
        before=owned * (2 * (end - size) + owned),
        models=of_models,
        parts=part * classes,
        true=true,
        clients=of_parts,
        known=Known.of(np.concatenate([exists[0], exists[0], exists[1]])),
        duels=duels(classes, np.array(parts, np.int64), y[first:], rows[first:], true),
    )


def duels(classes: int, sizes: IntArray, y: IntArray, rows: IntArray, true: IntArray) -> Duels | None:
    """The pairs of samples of parts of these sizes, see `Layout`; of two classes those of class 1 only."""
    if (sizes**2).sum() > PAIRS:
        return None
    every = np.repeat(sizes, sizes)  # of each sample: the samples of its part
    one = np.repeat(np.arange(len(y)), every)
    skipped = np.repeat((sizes.cumsum() - sizes).repeat(sizes) - (every.cumsum() - every), every)
    other = np.arange(len(one)) + skipped
    useful = (y[one] != y[other]) & ((classes != 2) | (y[one] == 1))
    one, other = one[useful], other[useful]
    return Duels(rows[one] + y[one], rows[other] + y[one], true[one])
