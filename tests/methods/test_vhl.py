"""VHL: the contrast on numbers, twice as many outputs, the noise that every site makes alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, tensor
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from fedskew.core.fit import Fit
from fedskew.core.losses import alignment, supervised_contrast
from fedskew.core.method import model_of
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Tensors
from fedskew.methods import vhl
from fedskew.methods._shared.virtual import endless_batches, noise_set, virtual_labels
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.vhl import EXTRA, VHL, VIRTUAL, WideHead
from helpers.nets import normed, received, work
from toys import digits, rounds, same

SMALL = VHL(n_v=4, virtual_batch=8)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(("tau", "expected"), [(0.07, 0.2310627322), (1.0, 0.3646602357)])
def test_the_contrast_on_numbers(tau: float, expected: float) -> None:
    """(1, 0) and (1, 1) of class 0, whose cosine is .7071, and (0, 1) of class 1, which has no other: it adds 0."""
    z = tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    assert supervised_contrast(z, tensor([0, 1, 0]), tau).item() == pytest.approx(expected, abs=1e-9)


def test_the_wide_head_is_the_head_and_a_linear_layer_beside_it() -> None:
    head, z = nn.Linear(2, 3), tensor([[1.0, 2.0]])
    extra = Tensors(weight=tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), bias=tensor([0.0, 0.5, 1.0]))
    wide = WideHead(head, extra)
    assert_close(wide(z)[:, :3], head(z))
    assert_close(wide(z)[:, 3:], tensor([[1.0, 2.5, 4.0]]))
    with torch.no_grad():
        wide.weight.add_(1)
    assert extra["weight"][0, 0] == 1
    assert wide.extra()["weight"][0, 0] == 2


def images(shape: tuple[int, int, int]) -> Data:
    """Made of `channels, height, width`."""
    channels, height, width = shape
    x = torch.zeros(1, height, width, channels, dtype=torch.uint8)
    return Data(x, tensor([0]), tensor([0]), (0.5,) * channels, (0.25,) * channels)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (2, 5, 9)])
def test_noise_is_of_the_images_shape_and_range(shape: tuple[int, int, int]) -> None:
    """Pixels in [0, 1] with mean .5 and deviation .25: (0 - .5) / .25 = -2 to 2. Many are cut at both ends."""
    made = noise_set(images(shape), 3, 5, 1)
    assert made.shape == (15, *shape)
    assert made.min() == -2
    assert made.max() == 2


def test_noise_of_a_class_has_a_mean_of_its_own() -> None:
    """Not cut or enlarged (a table): means N(0, 1), samples about them with deviation 1/2."""
    made = noise_set(Data(torch.zeros(1, 400), tensor([0]), tensor([0])), 3, 200, 1).view(3, 200, 400)
    means = made.mean(1)
    assert float((made - means[:, None]).std()) == pytest.approx(0.5, rel=0.02)
    assert float(means.std()) == pytest.approx(1, rel=0.08)
    assert float(torch.corrcoef(means).fill_diagonal_(0).abs().max()) < 0.2


def test_noise_is_enlarged_between_the_centres_of_its_pixels_and_cut_afterwards() -> None:
    """From 8x8 to 16x16, first row: pixel 0 is a_0 and pixel 1 is 3/4 a_0 + 1/4 a_1, cut to [0, 1] only then."""
    rng = seeded(1)
    low = torch.randn(4, 1, 8, 8, generator=rng)
    low = low + 0.5 * torch.randn(low.shape, generator=rng)
    pixels = noise_set(images((1, 16, 16)), 4, 1, 1) * 0.25 + 0.5
    assert_close(pixels[:, 0, 0, 0], low[:, 0, 0, 0].clamp(0, 1))
    row = 0.75 * low[:, 0, 0, :-1] + 0.25 * low[:, 0, 0, 1:]
    assert_close(pixels[:, 0, 0, 1:-1:2], row.clamp(0, 1))


def test_the_seed_decides_the_noise() -> None:
    a, b, c = (noise_set(images((1, 8, 8)), 2, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    "changes", [{}, {"lambda_v": 0.5}, {"lambda_v": 0.0}, {"lambda_c": 0.0}, {"lambda_c": 3.0}], ids=str
)
def test_the_loss_has_twice_the_classes_and_aligns_matched_labels(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cross entropies run over 2C outputs, virtual labels are y + C there and y in the contrast.

    Body and batch norm see real and virtual samples in one batch.
    """
    method = replace(SMALL, **changes)
    world = normed(method)
    broadcast = received(world)
    seen: list[float] = []

    def once(site: Site, loss: Loss) -> Fit:
        x, y = site.data.take(torch.arange(16))
        site.net.train()
        seen.append(loss(site.net, x, y).item())
        return Fit(1, 0.0)

    monkeypatch.setattr(vhl, "fit", once)
    method.client(world.site(1, 0, "train"), broadcast, {})
    site = world.site(1, 0, "train")
    site.load(broadcast)
    site.net.train()
    x, y = site.data.take(torch.arange(16))
    noise = noise_set(site.data, 10, 4, int(broadcast[VIRTUAL]["seed"]))
    x_v, y_v = next(endless_batches(noise, virtual_labels(10, 4), 8, site.rng))
    both = site.net.body(torch.cat([x, x_v]))
    logits = torch.cat([site.net.head(both), linear(both, broadcast[EXTRA]["weight"], broadcast[EXTRA]["bias"])], 1)
    wanted = cross_entropy(logits[:16], y) + method.lambda_v * cross_entropy(logits[16:], y_v + 10)
    wanted = wanted + method.lambda_c * alignment(both[:16], y, both[16:], y_v, 0.07)
    assert seen == [pytest.approx(wanted.item(), rel=1e-5)]


def test_the_virtual_classes_outputs_are_trained_and_averaged_by_samples() -> None:
    world = digits(SMALL, hidden="12")
    start = received(world)
    updates = [work(world, c, 0, start, {}).update for c in (0, 1)]
    server = world.method.aggregate(world.server_site(0, "train"), start, iter(updates))
    n = tensor([u.weight for u in updates])
    for name in ("weight", "bias"):
        a, b = (u.payload[EXTRA][name] for u in updates)
        assert not torch.equal(a, start[EXTRA][name])
        assert_close(server[EXTRA][name], (n[0] * a + n[1] * b) / n.sum())
        assert_close(start[EXTRA][name].abs().max().item(), 12**-0.5, rtol=0.1, atol=0)
    assert torch.equal(server[VIRTUAL]["seed"], start[VIRTUAL]["seed"])


def test_the_extra_payload_is_the_virtual_outputs_and_a_seed() -> None:
    """Of 12 features and 10 classes, to and from 2 clients; D' itself never."""
    ours, _ = rounds(digits(SMALL, hidden="12"), 2, cohorts=[[0, 1]] * 2)
    plain, _ = rounds(digits(FedAvg(), hidden="12"), 2, cohorts=[[0, 1]] * 2)
    for a, b in zip(ours, plain, strict=True):
        assert a.bytes_down == b.bytes_down | {EXTRA: 2 * 4 * 10 * 13, VIRTUAL: 2 * 8}
        assert a.bytes_up == b.bytes_up | {EXTRA: 2 * 4 * 10 * 13}
    assert not same(model_of(ours[0].server), model_of(plain[0].server))


def test_a_head_of_two_layers_gets_its_virtual_outputs_from_the_features() -> None:
    world = digits(SMALL, hidden="12")

    def two_layers() -> Any:
        net = world.make_net()
        net.head = nn.Sequential(net.head, nn.ReLU(), nn.Linear(10, 10))
        return net

    with torch.random.fork_rng(devices=[]):
        records, _ = rounds(replace(world, make_net=two_layers), 1)
    assert records[0].server[EXTRA]["weight"].shape == (10, 12)
