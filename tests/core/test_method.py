"""Means over updates."""

import torch

from fedskew.core.method import Update, mean_of
from fedskew.core.tensors import Tensors


def test_a_mean_is_by_weight_unless_it_is_to_be_uniform() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5; (2 + 6) / 2 = 4. A group that is not asked for is left out."""
    updates = [
        Update({"parameters": Tensors(w=torch.tensor(w)), "other": Tensors(v=torch.tensor(w))}, weight)
        for w, weight in ((2.0, 1.0), (6.0, 3.0))
    ]
    assert mean_of(updates) == {"parameters": {"w": torch.tensor(5.0)}}
    assert mean_of(updates, uniform=True) == {"parameters": {"w": torch.tensor(4.0)}}
    assert mean_of(updates, groups=["other"]) == {"other": {"v": torch.tensor(5.0)}}
