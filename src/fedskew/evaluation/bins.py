"""Which bin a score falls into.

A score is the logit of a class's probability, s = log(p / (1 - p)). Its bins have width 1/64 in 4 asinh(s / 4), which
is s itself near 0 and grows slower further out: two samples share a bin if their odds differ by less than 2 % where p
is about 1/2, by less than 7 % where p is 1e-7. Scores from -100 to 17 have bins; float32 cannot tell larger ones apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LOW, HIGH = -100.0, 17.0  # logits beyond these share a bin
BEND = 4.0  # the logit from which on bins become wider
PER_UNIT = 64  # bins per unit near 0
FIRST = math.floor(PER_UNIT * BEND * math.asinh(LOW / BEND))
SHORT = 1500  # numbers; torch's asinh of fewer takes less time than the calls that would save it
NEAR = 0.01  # bins; a hundred times the error of asinh in float32
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
    keys: npt.NDArray[np.int16]  # [n, classes]: bin of the class's score * 2 + (1 if the sample is of this class)
    chance: FloatArray  # [n]: probability of the predicted class; 0 if it is not a number

    def rows(self, start: int, end: int) -> Placed:
        """Samples `start` to `end`."""
        part = slice(start, end)
        return Placed(self.y[part], self.predicted[part], self.keys[part], self.chance[part])


def place(made: Predictions) -> Placed:
    """Find the bins of predictions. A score that is not a number goes to the first bin."""
    log_p, y = made.log_p.contiguous(), made.y.numpy()
    logit = log_p.exp().neg_().log1p_()
    logit = torch.sub(log_p, logit, out=logit).nan_to_num_(nan=LOW, posinf=HIGH, neginf=LOW).clamp_(LOW, HIGH)
    keys = (2 * (bin_numbers(logit.div_(BEND).numpy()) - FIRST)).astype(np.int16)
    keys.reshape(-1)[np.arange(len(y)) * keys.shape[1] + y] += 1
    chance = log_p.amax(dim=1).exp_().double().nan_to_num_(0.0).numpy()
    return Placed(y, made.predicted.numpy(), keys, chance)


def bin_numbers(bent: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The whole part of BEND * PER_UNIT * asinh(bent), as torch computes it.

    numpy's asinh takes a tenth of the time, but may have another last bit: near a whole number torch's decides.
    """
    if bent.size <= SHORT:
        return torch.from_numpy(bent).asinh().mul_(BEND * PER_UNIT).floor_().numpy()
    scaled = np.arcsinh(bent)
    scaled *= BEND * PER_UNIT
    near = np.flatnonzero(np.abs(scaled - np.rint(scaled)) < NEAR)
    scaled = np.floor(scaled, out=scaled)
    exact = torch.from_numpy(bent.reshape(-1)[near]).asinh_().mul_(BEND * PER_UNIT).floor_()
    scaled.reshape(-1)[near] = exact.numpy()
    return scaled
