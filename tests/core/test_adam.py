"""Adam on one vector against torch.optim.Adam on its tensors: the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedskew.core.fast.adam import FlatAdam
from fedskew.core.fit import fit
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.models import build

SIZES = [1, 7, 8, 10, 33, 64, 1000]


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_on_a_vector_are_those_of_torch_on_each_tensor_bit_for_bit(weight_decay: float) -> None:
    """Tensors of every length, so that ends of vectorised loops lie elsewhere than in the vector."""
    values = torch.randn(sum(SIZES), generator=seeded(0))
    grads, kept = torch.zeros_like(values), values.clone()
    ours = FlatAdam(values, grads, lr=0.01, weight_decay=weight_decay)
    leaves = [part.clone().requires_grad_() for part in kept.split(SIZES)]
    theirs = torch.optim.Adam(leaves, lr=0.01, weight_decay=weight_decay)
    for step in range(50):
        grads.copy_(torch.randn(len(grads), generator=seeded(1, step)) * 10.0 ** (step % 5 - 3))
        before = grads.clone()
        for leaf, grad in zip(leaves, grads.split(SIZES), strict=True):
            leaf.grad = grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(values, torch.cat([leaf.detach() for leaf in leaves]))
        assert torch.equal(grads, before)
    assert not torch.equal(values, kept)


def noisy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A loss of a net whose body may not train."""
    return net(x).square().mean() + torch.nn.functional.cross_entropy(net(x), y)


@pytest.mark.parametrize("train", ["", "head.", ("body.1", "head.")])
def test_fit_with_adam_is_that_of_torch_optim(train: str | tuple[str, ...]) -> None:
    """Also where only some parameters train, which may lie in several runs of the vector."""

    def trained(fast: bool) -> Tensors:
        net = build("mlp", (1, 6, 6), 3, seed=0, hidden="9-7")
        x, y = torch.randn(20, 1, 6, 6, generator=seeded(2)), torch.arange(20) % 3
        training = Training("adam", 0.01, weight_decay=0.02, batch_size=6, epochs=3)
        site = Site(net, Data(x, y, torch.arange(20)), training, 3, 1, {}, seeded(1))
        fit(replace(site, fast=fast), noisy, train=train)
        return site.parameters()

    with one_thread():
        fast, plain = trained(True), trained(False)
    assert [name for name in plain if not torch.equal(fast[name], plain[name])] == []
