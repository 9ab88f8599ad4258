"""Which bin a score falls into.

A score is the logit of a class's probability, s = log(p / (1 - p)). Its bins have width 1/64 in 4 asinh(s / 4), which
is s itself near 0 and grows slower further out: two samples share a bin if their odds differ by less than 2 % where p
is about 1/2, by less than 7 % where p is 1e-7. Scores from -100 to 17 have bins; float32 cannot tell larger ones apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.evaluation.bin_table import BinTable, Float32Array, Keys

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LOW, HIGH = -100.0, 17.0  # logits beyond these share a bin
BEND = 4.0  # the logit from which on bins become wider
PER_UNIT = 64  # bins per unit near 0
FIRST = math.floor(PER_UNIT * BEND * math.asinh(LOW / BEND))
BINS = math.floor(PER_UNIT * BEND * math.asinh(HIGH / BEND)) - FIRST + 1


class Predictions(NamedTuple):
    """What a model said about some samples, before it is counted."""

    log_p: Tensor  # [n, classes], float32
    y: Tensor  # [n], the true classes
    predicted: Tensor  # [n]

    @classmethod
    def cat(cls, parts: Sequence[Predictions]) -> Predictions:
        """All of them together."""
        return parts[0] if len(parts) == 1 else cls(*(torch.cat(list(tensors)) for tensors in zip(*parts, strict=True)))


class Placed(NamedTuple):
    """Predictions as numbers of bins."""

    y: IntArray  # [n]
    predicted: IntArray  # [n]
    keys: Keys  # [n, classes]: bin of the class's score * 2 + (1 if the sample is of this class)
    chance: FloatArray  # [n]: probability of the predicted class; 0 if it is not a number

    def rows(self, start: int, end: int) -> Placed:
        """Samples `start` to `end`."""
        part = slice(start, end)
        return Placed(self.y[part], self.predicted[part], self.keys[part], self.chance[part])


def place(made: Predictions) -> Placed:
    """Find the bins of predictions. A score that is not a number goes to the first bin."""
    log_p, y, predicted = made.log_p.contiguous().numpy(), made.y.numpy(), made.predicted.numpy()
    rows = np.arange(0, log_p.size, log_p.shape[1])
    keys = twice_bins(log_p)
    keys.reshape(-1)[rows + y] += 1
    return Placed(y, predicted, keys, chances(log_p.take(rows + predicted)))


def chances(log_p: Float32Array) -> FloatArray:
    """Probabilities from logarithms, which are changed; as torch computes them, and 0 for what is not a number."""
    found: FloatArray = np.fmax(torch.from_numpy(log_p).exp_().numpy(), 0.0, dtype=np.float64)
    return found


def twice_bins(log_p: Float32Array) -> Keys:
    """Twice the number of each log probability's bin, counted from the first."""
    table = bin_table()
    return table.of(log_p) if table.sharp else compute_twice_bins(log_p)


@lru_cache(maxsize=1)
def bin_table() -> BinTable:
    """What `compute_twice_bins` says about every number. Made when first needed; takes some hundredths of a second."""
    return BinTable(compute_twice_bins)


def compute_twice_bins(log_p: Float32Array) -> Keys:
    """`twice_bins` by their definition, in the arithmetic of torch."""
    given = torch.from_numpy(log_p)
    logit = given.exp().neg_().log1p_()
    logit = torch.sub(given, logit, out=logit).nan_to_num_(nan=LOW, posinf=HIGH, neginf=LOW).clamp_(LOW, HIGH)
    number = logit.div_(BEND).asinh_().mul_(BEND * PER_UNIT).floor_().numpy()
    return (2 * (number - FIRST)).astype(np.int16)
