"""A user's own net: what is made faster, what must stay, and which nets are left alone."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedskew
from fedskew.core.fast.by_hand import chain_of
from fedskew.core.net import Net
from fedskew.data.dataset import DataSet
from fedskew.models.layers import ConvPool, ReluPool
from fedskew.models.net import wrap
from fedskew.models.quick import contiguous_input, own_net

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)


def lenet(channels: int, width: int, flat: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, width, 5), nn.ReLU(inplace=True),
        nn.MaxPool2d((2, 2), stride=2), nn.Flatten(), nn.Linear(flat, 20), nn.ReLU(), nn.Linear(20, 10),
    )  # fmt: skip


class Tutorial(nn.Module):
    """The net of PyTorch's tutorial: functional pooling, and `view` to flatten."""

    def __init__(self, channels: int = 3, flat: int = 800) -> None:
        super().__init__()
        self.c1, self.c2, self.out = nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 32, 5), nn.Linear(flat, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.c2(F.max_pool2d(F.relu(self.c1(x)), 2))), 2)
        out: Tensor = self.out(x.view(x.size(0), -1))
        return out


class Sliced(nn.Module):
    """Uses the first layers of a Sequential on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.out = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2)), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.stack[:2](x).mean((2, 3)))
        return out


def made(module: nn.Module, head: str, shape: tuple[int, ...], fast: bool = True) -> Net:
    return own_net(partial(wrap, module, head), shape, fast)


def gradients(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    net.zero_grad()
    logits = net(x)
    F.cross_entropy(logits, torch.arange(len(x)) % 10).backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize(("shape", "rest"), [(GRAY, 16), (COLOUR, 25)])
def test_a_sequential_gets_fast_layers_with_the_same_names_values_and_gradients(
    shape: tuple[int, ...], rest: int, width: int, batch: int
) -> None:
    module = lenet(shape[0], width, width * rest)
    net, plain = made(module, "9", shape), made(module, "9", shape, fast=False)
    assert [type(layer) for layer in net.body[:3]] == [ConvPool, nn.Identity, nn.Identity]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))
    x = torch.randn(batch, *shape).to(memory_format=torch.channels_last)
    for a, b in zip(gradients(net, x), gradients(plain, x), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_its_step_is_computed_without_autograd_like_that_of_our_own_nets() -> None:
    net = made(lenet(1, 16, 256), "9", GRAY)
    assert chain_of(net, net.body, net.head) is not None


def test_relu_and_pool_after_another_layer_are_swapped_with_the_same_bits() -> None:
    """A value of 0 or less passes neither ReLU nor, as the largest of four, the pool; ties go to the first."""
    module = nn.Sequential(nn.BatchNorm2d(1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(196, 10))
    net, plain = made(module, "4", GRAY), wrap(module, "4")
    assert type(net.body[2]) is ReluPool
    x = torch.randint(-2, 3, (6, *GRAY)).float()
    for a, b in zip(gradients(net, x), gradients(plain, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True),
     nn.MaxPool2d(2, dilation=2), nn.AvgPool2d(2)],
)  # fmt: skip
def test_other_pools_are_left_as_they_are(pool: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(10))
    module(torch.zeros(2, *GRAY))
    net = made(module, "4", GRAY)
    assert [type(layer) for layer in net.body[:3]] == [nn.Conv2d, nn.ReLU, type(pool)]


def test_a_net_that_uses_a_slice_of_a_sequential_is_left_as_it_is() -> None:
    module = Sliced()
    net = made(module, "out", GRAY)
    assert type(net.body.stack[1]) is nn.ReLU
    x = torch.randn(4, *GRAY)
    assert torch.equal(net(x), module(x))


@pytest.mark.parametrize("fast", [True, False])
def test_a_net_that_flattens_with_view_takes_images_in_channels_last(fast: bool) -> None:
    module = Tutorial()
    net = made(module, "out", COLOUR, fast)
    x = torch.randn(4, *COLOUR)
    assert torch.equal(net(x.to(memory_format=torch.channels_last)), module(x))
    assert contiguous_input in net.body._forward_pre_hooks.values()
    assert not module._forward_pre_hooks


def test_plain_leaves_every_layer_and_the_users_module_is_never_changed() -> None:
    module = lenet(1, 32, 512)
    before = copy.deepcopy(module.state_dict())
    assert repr(made(module, "9", GRAY, fast=False).body[:9]) == repr(module[:9])
    net = made(module, "9", GRAY)
    gradients(net, torch.randn(4, *GRAY))
    assert type(module[0]) is nn.Conv2d
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    assert module[3].weight.is_contiguous()


def test_making_it_draws_no_random_numbers() -> None:
    module = lenet(1, 16, 256)
    torch.manual_seed(5)
    made(module, "9", GRAY)
    after = torch.rand(())
    torch.manual_seed(5)
    assert after == torch.rand(())


@pytest.mark.parametrize("step", ["fast", "plain"])
def test_the_tutorials_net_trains_on_colour_images(step: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, 32, 32, 3), generator=rng, dtype=torch.uint8).numpy()
    y = (torch.arange(40) % 10).numpy()
    data = dataclasses.replace(DataSet("made", x, y, x[:10], y[:10], 10), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    experiment = fedskew.Experiment(data=data, model=Tutorial(), split="iid:clients=2", rounds=1, step=step)
    *_, last = fedskew.run(experiment)
    assert last.lost == {}
