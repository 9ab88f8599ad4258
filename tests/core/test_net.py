"""Nets: passes that leave the running statistics of batch norm as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedskew.core.net import Net, outputs, still_statistics


def normed() -> Net:
    return Net(nn.BatchNorm1d(3), nn.Linear(3, 2), features=3).train()


def test_statistics_stand_still_inside_and_move_after_it() -> None:
    net, x = normed(), 5 + torch.arange(12.0).view(4, 3)
    wanted = normed().body(x)
    with still_statistics(net):
        made = net.body(x)
    assert torch.equal(made, wanted)  # normalised by the batch, as in training
    assert not net.body.running_mean.any()
    assert net.body.num_batches_tracked == 0
    net.body(x)
    assert net.body.running_mean.all()
    assert net.body.num_batches_tracked == 1


def test_statistics_move_again_after_an_error_inside() -> None:
    net = normed()
    with pytest.raises(ZeroDivisionError), still_statistics(net):
        _ = 1 / 0
    assert net.body.track_running_stats


@pytest.mark.parametrize("batch_statistics", [True, False])
def test_evaluation_uses_the_asked_statistics_and_moves_none(batch_statistics: bool) -> None:
    """A batch of (1, 3): by its own statistics -1 and 1, by the running ones (mean 0, variance 1) itself."""
    net, x = normed(), torch.tensor([[1.0] * 3, [3.0] * 3])
    made = outputs(net, net.body, x, batch_statistics=batch_statistics)
    wanted = torch.tensor([-1.0, 1.0]) if batch_statistics else x[:, 0]
    torch.testing.assert_close(made[:, 0], wanted, rtol=1e-4, atol=0)
    assert not net.body.running_mean.any()
    assert not net.body.training
    assert net.body.track_running_stats
