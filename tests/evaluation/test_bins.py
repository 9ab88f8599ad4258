"""Which bin a score falls into does not depend on how it is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.evaluation import bins
from fedskew.evaluation.bin_table import BinTable, Float32Array, Keys
from fedskew.evaluation.bins import BINS, Predictions, bin_table, compute_twice_bins, place


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


def test_bins_that_are_looked_up_are_those_that_are_computed() -> None:
    """At each edge the 65 nearest numbers; two million others of every size and sign; and what is not a number."""
    grid = np.arange(0, 1 << 32, 2039, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = -np.logspace(-8, 2.3, 200_000).astype(np.float32)
    found = compute_twice_bins(values)
    apart = found[:-1] != found[1:]
    low, high = (side[apart].view(np.uint32) for side in (values[:-1], values[1:]))
    while (high - low).max() > 1:
        middle = low + (high - low) // 2
        same = compute_twice_bins(middle.view(np.float32)) == found[:-1][apart]
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    near = (high[:, None].astype(np.int64) + np.arange(-32, 33)).astype(np.uint32).reshape(-1).view(np.float32)
    assert len(high) > 1400
    for some in (grid, values, near):
        assert np.array_equal(bin_table().of(some), compute_twice_bins(some))


def test_where_rounding_makes_bins_flicker_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which, near an edge, a larger number has a smaller bin: the table says that it is not sharp."""

    def flickering(values: Float32Array) -> Keys:
        bits = values.view(np.uint32)
        edge = np.float32(-1.001).view(np.uint32)
        return ((bits > edge) ^ (bits == edge - 3)).astype(np.int16)

    table = BinTable(flickering)
    assert not table.sharp
    assert bin_table().sharp
    monkeypatch.setattr(bins, "bin_table", lambda: table)
    scores = np.array([-1.0, -2.0, -50.0], np.float32)
    assert np.array_equal(bins.twice_bins(scores), compute_twice_bins(scores))
