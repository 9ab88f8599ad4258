"""A net's parameters as one buffer."""

from __future__ import annotations

import torch
from torch import nn

from fedskew.core.fast.flat import flat_of
from fedskew.core.tensors import Tensors


def test_a_vector_lies_as_the_values_do_also_in_channels_last_memory() -> None:
    """Tensors that are views of one plain vector must be laid out anew for a net whose weights are channels-last."""
    for memory in (torch.contiguous_format, torch.channels_last):
        net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=memory)
        named = {name: p.detach() for name, p in net.named_parameters()}
        views = Tensors.views(torch.cat([p.reshape(-1) for p in named.values()]), named)
        flat = flat_of(net)
        assert torch.equal(flat.vector(net, views), flat.values)
        assert torch.equal(flat.vector(net, dict(named)), flat.values)
