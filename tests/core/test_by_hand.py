"""The step without autograd against the step with it: the same bits, and only for nets it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedskew.core.fast.by_hand import chain_of, imitation_slope, slope_by_autograd
from fedskew.core.fit import fit
from fedskew.core.losses import Corrected, OfLogits, imitation, plain
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.models import build

NETS: dict[str, Callable[[], Net]] = {
    "simple-cnn": lambda: build("simple-cnn", (1, 28, 28), 10, seed=0),
    "colour": lambda: build("simple-cnn", (3, 32, 32), 10, seed=0),
    "cnn": lambda: build("cnn", (1, 28, 28), 10, seed=0, hidden=32),
    "mlp": lambda: build("mlp", (1, 28, 28), 10, seed=0, hidden="20-20"),
}


def images(channels: int, side: int, size: int) -> Data:
    """Images whose left half is blank, so that pooling meets ties."""
    x = torch.randint(256, (size, side, side, channels), generator=seeded(0), dtype=torch.uint8)
    x[:, :, : side // 2] = 0
    mean, std = (0.5,) * channels, (0.25,) * channels
    return Data(x, torch.arange(size) % 10, torch.arange(size), mean, std)


def trained(name: str, size: int, loss: Callable[[Net, Tensor, Tensor], Tensor], training: Training) -> Tensors:
    channels, side = (3, 32) if name == "colour" else (1, 28)
    site = Site(NETS[name](), images(channels, side, size), training, 10, 1, {}, seeded(1))
    with one_thread():
        fit(site, loss)
    return site.parameters()


def through_autograd(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The same loss under another name, which `fit` does not know."""
    return plain(net, x, y)


@pytest.mark.parametrize("batch", [1, 4, 10, 13, 40])
@pytest.mark.parametrize("name", NETS)
def test_gradients_by_hand_are_those_of_autograd_bit_for_bit(name: str, batch: int) -> None:
    training = Training(lr=0.1, momentum=0.9, weight_decay=0.01, clip=1.0, batch_size=batch, steps=3)
    by_hand, by_autograd = (trained(name, 2 * batch + 1, loss, training) for loss in (plain, through_autograd))
    assert all(torch.equal(by_hand[p], by_autograd[p]) for p in by_autograd)


@pytest.mark.parametrize("terms", [("tilt",), ("anchor",), ("tilt", "anchor")])
def test_corrected_terms_are_added_as_autograd_would(terms: tuple[str, ...]) -> None:
    parameters = {name: p.detach() for name, p in NETS["mlp"]().named_parameters()}
    given = {
        term: {name: torch.randn(p.shape, generator=seeded(3)) for name, p in parameters.items()} for term in terms
    }
    corrected = Corrected(plain, strength=0.3, **given)
    training = Training(lr=0.1, batch_size=8, epochs=2)
    by_hand = trained("mlp", 20, corrected, training)
    by_autograd = trained("mlp", 20, replace(corrected, loss=through_autograd), training)
    assert all(torch.equal(by_hand[p], by_autograd[p]) for p in by_autograd)
    assert not torch.equal(by_hand["head.weight"], trained("mlp", 20, plain, training)["head.weight"])


def lesson(logits: Tensor, y: Tensor) -> Tensor:
    """A loss in which the logits appear twice."""
    return imitation(logits, logits.detach().flip(1), 2.0) + 0.5 * cross_entropy(logits, y)


@pytest.mark.parametrize("name", NETS)
def test_a_loss_of_the_logits_alone_is_differentiated_as_autograd_would(name: str) -> None:
    training = Training(lr=0.1, weight_decay=0.01, clip=1.0, batch_size=13, steps=3)
    by_hand = trained(name, 27, OfLogits(lesson), training)
    by_autograd = trained(name, 27, lambda net, x, y: lesson(net(x), y), training)
    assert all(torch.equal(by_hand[p], by_autograd[p]) for p in by_autograd)
    assert not torch.equal(by_hand["head.weight"], trained(name, 27, plain, training)["head.weight"])


def test_a_loss_of_the_logits_alone_takes_the_chain_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(NETS["mlp"](), images(1, 28, 16), Training(lr=0.1, batch_size=16), 10, 1, {}, seeded(1))
    x, y = site.data.take(torch.arange(16))
    expected = lesson(site.net(x), y).item()
    monkeypatch.setattr(Net, "forward", None)  # the chain calls the layers
    assert fit(site, OfLogits(lesson)).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 13, 128])
def test_the_slope_of_imitation_is_that_of_autograd_bit_for_bit(batch: int) -> None:
    student, teacher = (5 * torch.randn(batch, 10, generator=seeded(seed)) for seed in (0, 1))
    by_hand, by_autograd = imitation_slope(student, teacher), slope_by_autograd(imitation)(student, teacher)
    assert all(torch.equal(a, b) for a, b in zip(by_hand, by_autograd, strict=True))
    assert float(by_hand[1].abs().max()) > 0


class Doubled(nn.Linear):
    """A layer that looks like Linear and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "net",
    [
        Net(nn.Sequential(nn.Flatten(), Doubled(6, 4)), nn.Linear(4, 3), 4),
        Net(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(6, 3), 6),
        Net(nn.Sequential(nn.Flatten(2)), nn.Linear(6, 3), 6),
        Net(nn.Sequential(nn.Flatten(1, 2)), nn.Linear(6, 3), 6),
        Net(nn.Identity(), nn.Linear(6, 3, bias=False), 6),
        build("simple-cnn", (1, 16, 16), 3, seed=0, fast=False),
        build("cnn4", (1, 16, 16), 3, seed=0),
    ],
)
def test_a_net_with_anything_else_in_it_goes_through_autograd(net: Net) -> None:
    assert chain_of(net, net.body, net.head) is None


def test_a_net_with_a_hook_goes_through_autograd() -> None:
    net = NETS["mlp"]()
    net.head.register_forward_hook(lambda layer, x, y: 2 * y)
    assert chain_of(net, net.body, net.head) is None
    watched = NETS["mlp"]()
    watched.head.weight.register_hook(lambda gradient: 2 * gradient)
    assert chain_of(watched, watched.body, watched.head) is None
    plain_net = NETS["mlp"]()
    assert chain_of(plain_net, plain_net.body, plain_net.head) is not None


def test_a_net_with_a_forward_of_its_own_goes_through_autograd() -> None:
    class Doubled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    net, training = NETS["mlp"](), Training(lr=0.1, batch_size=8)
    own = Doubled(net.body, net.head, net.features)
    site = Site(own, images(1, 28, 16), training, 10, 1, {}, seeded(1))
    fit(site, plain)
    assert not torch.equal(site.parameters()["head.weight"], trained("mlp", 16, plain, training)["head.weight"])
    assert "_chain" not in own.__dict__
