"""Counts the predictions of several models at once: for so few that a call of numpy takes longer than its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedskew.evaluation.areas import over_classes_of_each, part_aurocs
from fedskew.evaluation.bins import FloatArray, IntArray, Placed, Predictions, chances, twice_bins
from fedskew.evaluation.counts import LEVELS, ONE, Counts, sparse
from fedskew.evaluation.layout import Duels, Layout, layout


class Few(NamedTuple):
    """What was counted."""

    models: list[Counts]  # of each model, with their figures
    aurocs: list[float | None]  # `Counts.auroc` of each part
    correct: IntArray  # [parts, classes]: the part's samples of each class that were predicted right
    total: IntArray  # [parts, classes]: its samples of each class
    predicted: IntArray  # [parts, classes]: its samples that were predicted as each class


class Entries(NamedTuple):
    """The different scores of each model, in order."""

    at: IntArray  # places in the model's table, see `Counts.scores`
    number: IntArray  # how many there are of each
    first: IntArray  # which is the first of them, in order, of the scores of all models
    bounds: list[int]  # how many there are before each model, and in all


def count_few(made: Sequence[Predictions], models: Sequence[int], parts: Sequence[int]) -> Few:
    """Count predictions of the samples of one model after the other; `models` is how many each has.

    The last of them are also looked at in parts, one of each client, of the sizes `parts`.
    """
    log_p, y, predicted = (
        np.concatenate([tensor.numpy() for tensor in tensors]) for tensors in zip(*made, strict=True)
    )
    classes, count = log_p.shape[1], len(models)
    where = layout(classes, tuple(models), tuple(parts), y.tobytes())
    keys, right = twice_bins(log_p.reshape(-1)), predicted == y
    confusion = np.bincount(where.cells + predicted, minlength=count * classes * classes).reshape(-1, classes, classes)
    entries = in_order(keys, where)
    roc, pr = areas_of_models(entries, where)
    calibration = calibrations(chances(log_p.take(where.rows + predicted)), right, where, count)
    first = len(y) - len(where.true)
    size = len(parts) * classes
    correct = np.bincount(where.true[right[first:]], minlength=size)
    said = np.bincount(where.parts + predicted[first:], minlength=size)
    tables = [table.reshape(-1, classes) for table in (correct, where.clients.owned, said)]
    if where.duels is not None:
        all_areas = np.concatenate([roc, pr, areas_of_parts(keys, where.duels, where)])
        means = over_classes_of_each(all_areas.reshape(-1, classes), where.known)
    else:
        means = over_classes_of_each(np.concatenate([roc, pr]).reshape(-1, classes))
        own = (keys + (where.tables & 1)).astype(np.int16).reshape(-1, classes)[first:]
        means += part_aurocs(Placed(y[first:], predicted[first:], own, np.zeros(0)), tables[1])
    areas = roc.reshape(-1, classes), pr.reshape(-1, classes)
    found = models_of(confusion, entries, calibration, areas, means)
    return Few(found, means[2 * count :], *tables)


def models_of(
    confusion: IntArray,
    entries: Entries,
    calibration: IntArray,
    areas: tuple[FloatArray, FloatArray],
    means: Sequence[float | None],
) -> list[Counts]:
    """The counts of each model, with their figures. `means` are those of its areas, see `Layout.known`."""
    count, classes = confusion.shape[:2]
    total, said = confusion.sum(axis=2).tolist(), confusion.sum(axis=1).tolist()
    correct = confusion.diagonal(axis1=1, axis2=2).tolist()
    gaps = np.abs(calibration[1] - calibration[2] / ONE).sum(axis=1).tolist()
    found = []
    for i in range(count):
        mine = slice(entries.bounds[i], entries.bounds[i + 1])
        cells = sparse(confusion[i].reshape(-1))
        counts = Counts(classes, cells, (entries.at[mine], entries.number[mine]), calibration[:, i])
        counts.__dict__.update(  # what it would compute otherwise
            confusion=confusion[i],
            by_class=(total[i], said[i], correct[i]),
            areas=(areas[0][i], areas[1][i]),
            auroc=means[i],
            auprc=means[count + i],
            ece=gaps[i] / max(sum(total[i]), 1),
        )
        found.append(counts)
    return found


def in_order(keys: npt.NDArray[np.int16], where: Layout) -> Entries:
    """The entries of each model in order; `keys` is twice the bin of each."""
    at = keys.view(np.uint16) + where.tables
    kind = "stable" if at.dtype == np.uint16 else None  # the stable way is by digits, but only of 16 bits
    for start, end in zip(where.bounds, where.bounds[1:], strict=False):
        at[start:end].sort(kind=kind)
    new = np.empty(len(at) + 1, np.bool_)
    np.not_equal(at[1:], at[:-1], out=new[1:-1])
    new[where.bounds] = True
    first = new.nonzero()[0]
    bounds = first.searchsorted(where.bounds).tolist()
    return Entries(at[first[:-1]].astype(np.int64), first[1:] - first[:-1], first[:-1], bounds)


def areas_of_models(entries: Entries, where: Layout) -> tuple[FloatArray, FloatArray]:
    """By group: area under the ROC curve, and average precision; the same bits as `areas`.

    Of each bin the pairs in the right order, ties as half, are own * (others below + others in it / 2). The others
    below are the places below in the group less the own ones below; those add up to owned^2 / 2, with half the ties.
    """
    own = (entries.at & 1).nonzero()[0]  # entries of samples of the class: the last of their bin
    previous = own - 1
    number, place = entries.number[own], entries.first[own]
    group = where.group[place]
    # the bin's other samples, if any, are just before; a model does not begin with the class that the last ended with
    tied = entries.at[previous] + 1 == entries.at[own]
    bottom = np.where(tied, entries.first[previous], place)
    own_above = where.owned_until[group] - number.cumsum() + number
    precision = own_above / (where.end[group] - bottom)
    groups = len(where.end)
    twice: Any = np.bincount(group, number * (bottom + place + number), groups) - where.before
    share: Any = np.bincount(group, number * precision, groups)
    return twice / (2 * where.models.pairs), share / where.models.divisor


def areas_of_parts(keys: npt.NDArray[np.int16], duels: Duels, where: Layout) -> FloatArray:
    """By part and class: area under the ROC curve, from the pairs in the right order less those in the wrong one."""
    balance: Any = np.bincount(
        duels.group, np.sign(keys.take(duels.own) - keys.take(duels.other)), len(where.clients.owned)
    )
    pairs = where.clients.pairs
    areas: FloatArray = (balance + pairs) / (2 * pairs)
    return areas


def calibrations(chance: FloatArray, right: npt.NDArray[np.bool_], where: Layout, models: int) -> IntArray:
    """`Counts.calibration` of each of several models.  # [3, models, LEVELS]"""
    level = np.minimum((chance * LEVELS).astype(np.int64), LEVELS - 1)
    level += where.levels
    size = models * LEVELS
    table = np.empty((3, size), np.int64)
    table[0] = np.bincount(level, None, size)
    table[1] = np.bincount(level, right, size)
    table[2] = np.bincount(level, np.rint(chance * ONE), size)
    return table.reshape(3, models, LEVELS)
