"""Counts as short text for a message between machines, and the checks of what a peer sends."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from fedskew.evaluation.areas import Sparse
from fedskew.evaluation.bins import BINS, IntArray
from fedskew.evaluation.counts import LEVELS, ONE, Counts

MOST_SAMPLES = 1 << 40  # sums of several sites stay far below 2 ** 63


def to_text(counts: Counts) -> str:
    """The counts as text. Places are sent as differences, which compress well."""
    (cells, cell_counts), (places, place_counts) = counts.cells, counts.scores
    lengths = np.array([len(cells), len(places)])
    steps = np.diff(cells, prepend=0), np.diff(places, prepend=0)
    whole = np.concatenate([lengths, steps[0], cell_counts, steps[1], place_counts, counts.calibration.ravel()])
    return base64.b64encode(zlib.compress(whole.astype("<i8").tobytes())).decode()


def most_numbers(classes: int) -> int:
    """How many numbers the counts of this many classes have at most."""
    return 2 + 2 * (classes * classes + 2 * BINS * classes) + 3 * LEVELS


def from_text(text: str, classes: int) -> Counts:
    """The inverse of `to_text`; ValueError if these cannot be counts of predictions of this many classes."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text, validate=True), 8 * most_numbers(classes))
    except zlib.error:
        raise ValueError("the counts are damaged") from None
    if not unzip.eof or len(data) % 8 or len(data) < 16:
        raise ValueError("the counts are cut off or too long")
    whole = np.frombuffer(data, "<i8").astype(np.int64)
    k, m = (int(n) for n in whole[:2])
    if min(k, m) < 0 or len(whole) != 2 + 2 * k + 2 * m + 3 * LEVELS:
        raise ValueError("the counts have the wrong length")
    cells, cell_counts, places, place_counts, rest = np.split(whole[2:], np.cumsum([k, k, m, m]))
    made = Counts(
        classes,
        _checked(cells, cell_counts, classes * classes),
        _checked(places, place_counts, 2 * BINS * classes),
        rest.reshape(3, LEVELS),
    )
    _check(made)
    return made


def _checked(steps: IntArray, n: IntArray, size: int) -> Sparse:
    if (steps[1:] <= 0).any() or (steps < 0).any() or (steps >= size).any() or steps.sum() >= max(size, 1):
        raise ValueError("a place is outside its table")
    if (n <= 0).any() or (n >= MOST_SAMPLES).any():
        raise ValueError("a count is not positive, or too large")
    return steps.cumsum(), n


def _check(counts: Counts) -> None:
    """Raise ValueError unless the tables are of the same samples."""
    confusion, n = counts.confusion, counts.samples
    at, count = counts.scores
    group = (at >> 1) // BINS * 2 + (at & 1)
    table = np.zeros(2 * counts.classes, np.int64)
    np.add.at(table, group, count)
    others, own = table.reshape(counts.classes, 2).T
    levels, correct, chance = counts.calibration
    fits = (
        n < MOST_SAMPLES
        and (own == confusion.sum(axis=1)).all()
        and (own + others == n).all()
        and (levels >= 0).all()
        and (levels < MOST_SAMPLES).all()
        and levels.sum() == n
        and ((correct >= 0) & (correct <= levels)).all()
        and correct.sum() == confusion.trace()
        and ((chance >= 0) & (chance / ONE <= levels)).all()
    )
    if not fits:
        raise ValueError("the counts contradict each other")
