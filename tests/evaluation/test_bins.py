"""Which bin a score falls into does not depend on how it is computed."""

from __future__ import annotations

import numpy as np
import torch

from fedskew.evaluation.bins import BEND, BINS, FIRST, HIGH, LOW, PER_UNIT, Predictions, bin_numbers, place


def test_bins_are_those_of_torchs_asinh_also_at_their_edges() -> None:
    """At each edge the 41 nearest float32 numbers, and a grid: no bin differs from floor(256 asinh(s / 4))."""
    edges = (BEND * np.sinh((np.arange(BINS) + FIRST) / (BEND * PER_UNIT))).astype(np.float32)
    near = edges[:, None] * (1 + np.arange(-20, 21, dtype=np.float32) * np.float32(6e-8))
    scores = torch.from_numpy(np.concatenate([near.ravel(), np.linspace(LOW, HIGH, 9999, dtype=np.float32)])) / BEND
    expected = scores.asinh().mul_(BEND * PER_UNIT).floor_()
    assert np.array_equal(bin_numbers(scores.numpy()), expected.numpy())


def test_every_score_has_a_bin_and_the_last_bit_says_whose_it_is() -> None:
    """Log probabilities from 0 to minus infinity, and one that is not a number; the memory order does not matter."""
    log_p = torch.tensor([[0.0, -float("inf")], [-1e-7, -16.0], [-0.69, -0.69], [float("nan"), -200.0]])
    y = torch.tensor([0, 0, 1, 1])
    found = place(Predictions(log_p, y, torch.zeros(4).long()))
    assert found.keys.min() >= 0
    assert found.keys.max() < 2 * BINS
    assert (found.keys & 1).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert found.keys[0].tolist() == [2 * (BINS - 1) + 1, 0]
    assert found.keys[3].tolist() == [0, 1]
    assert found.chance[[0, 3]].tolist() == [1.0, 0.0]
    turned = place(Predictions(log_p.t().contiguous().t(), y, torch.zeros(4).long()))
    assert np.array_equal(turned.keys, found.keys)
