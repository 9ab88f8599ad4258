"""Finds the bins of many scores by looking them up: each number of float32 has its bin, which torch decides once.

Log probabilities that share their first 18 bits (sign, exponent and 9 bits of the fraction) form a cell. Bins are so
wide that no cell has numbers of more than two bins, so for each cell there is one float32 from which on the second
applies. Numbers are compared as whole numbers, by their bits: of negative ones those grow away from zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.int16]
Float32Array = npt.NDArray[np.float32]
Decide = Callable[[Float32Array], Keys]

LOW_BITS = 14  # of a number's bits, that tell numbers of a cell apart
CELLS = 1 << (32 - LOW_BITS)
NEAR = 16  # numbers on each side of an edge that the bins are asked for


class BinTable:
    """The bins of all float32 numbers, as `decide` finds them.

    `steps` and `keys` are made such that keys[(steps[cell] + bits) >> (LOW_BITS + 1)] is a number's bin: what is
    shifted out carries exactly if the number is the first of the cell's second bin, or a later one.
    """

    def __init__(self, decide: Decide) -> None:
        first: Bits = np.arange(CELLS, dtype=np.uint32) << np.uint32(LOW_BITS)
        last: Bits = first + np.uint32((1 << LOW_BITS) - 1)
        below, above = (decide(bits.view(np.float32)) for bits in (first, last))
        split = np.flatnonzero(below != above)
        edges = _first_above(decide, first[split], last[split], below[split])
        self.sharp = _is_sharp(decide, edges, below[split], above[split])
        # a piece is a run of numbers that share a bin, as far as cells tell: a new one begins in every split cell,
        # and with every cell that does not go on where the last one ended
        fresh = np.concatenate([[0], below[1:] != above[:-1]])
        pieces = np.cumsum(fresh + np.concatenate([[0], (below != above)[:-1]]))  # of each cell's first number
        self.keys = np.zeros(pieces[-1] + 2, np.int16)
        self.keys[pieces] = below
        self.keys[pieces[split] + 1] = above[split]
        steps = (pieces.astype(np.uint32) << np.uint32(LOW_BITS + 1)) - first
        steps[split] += np.uint32(1 << (LOW_BITS + 1)) - (edges - first[split])
        self.steps = steps

    def of(self, values: Float32Array) -> Keys:
        """The bins of these numbers, in an array of the same shape."""
        bits = values.view(np.uint32)
        place = self.steps.take(bits >> LOW_BITS)
        place += bits
        place >>= LOW_BITS + 1
        return self.keys.take(place)


def _first_above(decide: Decide, first: Bits, last: Bits, below: Keys) -> Bits:
    """In each of several cells the first number whose bin is not that of the cell's first number."""
    for _ in range(LOW_BITS):
        middle = first + ((last - first) >> np.uint32(1))
        same = decide(middle.view(np.float32)) == below
        first, last = np.where(same, middle, first), np.where(same, last, middle)
    return last


def _is_sharp(decide: Decide, edges: Bits, below: Keys, above: Keys) -> bool:
    """Whether all numbers near an edge have the bin of their side. Else rounding makes bins flicker there."""
    steps = np.arange(-NEAR, NEAR, dtype=np.int64)
    near = (edges[:, None].astype(np.int64) + steps).astype(np.uint32)
    wanted = np.where(steps < 0, below[:, None], above[:, None])
    return bool(np.array_equal(decide(near.view(np.float32).reshape(-1)), wanted.reshape(-1)))
