"""Generators: layers and counts, virtual sets from values and a seed, batches for ever, distances to prototypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.generators import (
    KINDS,
    Generator,
    anchoring,
    convolutional,
    distance_cross_entropy,
    fully_connected,
    generator_from,
    nearest_is_own,
    new_generator,
    scaled_distances,
    values_of,
    virtual_set,
)
from fedskew.methods._shared.virtual import endless_batches, input_shape, new_seed, standardise, virtual_labels

DIGITS = (1, 8, 8)
VIRTUAL = tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]).double()  # P'
P = tensor([[2.0, 1.0], [0.0, 4.0], [0.0, 0.0]]).double()  # class 2 was not received
KNOWN = tensor([True, True, False])
Z, Y = tensor([[0.5, 0.5]]).double(), tensor([0])


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def fc(seed: int = 0) -> Generator:
    return new_generator(lambda: fully_connected(DIGITS, 3), seeded(seed))


# layers


@pytest.mark.parametrize(
    ("shape", "classes", "count"),
    [((3, 32, 32), 10, 3_909_504), ((3, 32, 32), 100, 3_921_024), ((1, 28, 28), 62, 1_570_960)],
    ids=["cifar10", "cifar100", "femnist"],
)
def test_the_five_layer_generator_has_the_published_parameters(
    shape: tuple[int, ...], classes: int, count: int
) -> None:
    """(512 + C) 128 + 128 256 + 256 512 + 512 1024 + 1024 chw, a bias each, and two for each of 1920 batch norms."""
    with torch.device("meta"):
        made = fully_connected(shape, classes)
    assert sum(p.numel() for p in made.parameters()) == count
    assert sum(isinstance(layer, torch.nn.Linear) for layer in made.modules()) == 5


def test_between_its_layers_are_batch_norm_and_a_leaky_relu() -> None:
    kinds = [type(layer).__name__ for layer in fc().layers]
    assert kinds == ["Linear", "BatchNorm1d", "LeakyReLU"] * 4 + ["Linear", "Tanh"]
    assert {layer.negative_slope for layer in fc().layers if isinstance(layer, torch.nn.LeakyReLU)} == {0.2}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 5, 7), (1, 1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_shape_asked_for_and_lie_between_minus_one_and_one(kind: str, shape: tuple[int, ...]) -> None:
    made = new_generator(lambda: KINDS[kind](shape, 4), seeded(0))
    images = virtual_set(made, 3, 1)
    assert images.shape == (12, *shape)
    assert images.abs().max() <= 1
    large = 100 * torch.rand(6, made.noise, generator=seeded(2))
    assert made.train()(large, tensor([0, 1, 2, 3, 0, 1])).abs().max() <= 1


def test_only_images_can_be_convolved() -> None:
    assert virtual_set(new_generator(lambda: fully_connected((5,), 4), seeded(0)), 2, 1).shape == (8, 5)
    with pytest.raises(UsageError, match=r"gen=cnn is invalid for shape \(5,\): expected images"):
        convolutional((5,), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_depend_on_both_label_and_noise(kind: str) -> None:
    made = new_generator(lambda: KINDS[kind](DIGITS, 3), seeded(0)).eval().requires_grad_(False)
    eps = torch.rand(1, made.noise, generator=seeded(1)).repeat(3, 1)
    a, b, c = made(eps, tensor([0, 0, 1]))
    assert_close(a, b)
    assert float((a - c).abs().max()) > 1e-3
    other = made(torch.rand(1, made.noise, generator=seeded(2)), tensor([0]))[0]
    assert float((a - other).abs().max()) > 1e-3


def test_initial_values_come_from_the_given_generator_and_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    a, b, c = (values_of(fc(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["layers.0.weight"], c["layers.0.weight"])


# virtual sets


def test_a_virtual_set_is_balanced_and_ordered_by_class() -> None:
    assert virtual_labels(3, 2).tolist() == [0, 0, 1, 1, 2, 2]
    made = fc()
    images, y = virtual_set(made, 2, 7), virtual_labels(3, 2)
    eps = torch.rand(6, 512, generator=seeded(7))
    assert_close(images, made.eval()(eps, y).detach())
    assert not images.requires_grad


def test_the_same_values_and_seed_give_the_same_bits_and_another_seed_does_not() -> None:
    made = fc().train()
    made(torch.rand(8, 512, generator=seeded(3)), torch.arange(8) % 3)  # its statistics have moved
    again = generator_from(lambda: fully_connected(DIGITS, 3), values_of(made))
    first = virtual_set(made, 4, 11)
    assert torch.equal(first, virtual_set(again, 4, 11))
    assert not torch.equal(first, virtual_set(again, 4, 12))


def test_values_are_copies_both_ways() -> None:
    made = fc()
    values = values_of(made)
    again = generator_from(lambda: fully_connected(DIGITS, 3), values)
    with torch.no_grad():
        for parameter in (*made.parameters(), *again.parameters()):
            parameter.zero_()
    assert values["layers.0.weight"].any()


def test_making_a_virtual_set_changes_neither_statistics_nor_the_global_random_state() -> None:
    made, before = fc().train(), torch.get_rng_state()
    values = values_of(made)
    virtual_set(made, 3, 5)
    assert all(torch.equal(t, values[name]) for name, t in values_of(made).items())
    assert torch.equal(torch.get_rng_state(), before)


def test_new_seeds_keep_all_their_bits_in_a_seeded_generator() -> None:
    rng = seeded(0)
    seeds = [new_seed(rng) for _ in range(64)]
    assert len(set(seeds)) == 64
    assert 1 << 31 < max(seeds) < 1 << 32


def image_data() -> Data:
    x = torch.zeros(2, 4, 5, 3, dtype=torch.uint8)
    return Data(x, tensor([0, 1]), torch.arange(2), (0.5, 0.25, 0.0), (0.5, 0.25, 2.0))


def test_shapes_and_pixels_are_those_of_a_net_s_input() -> None:
    """Black, (0 - mean) / std = (-1, -1, 0), is what `take` makes of 0; white is (1, 3, .5)."""
    data = image_data()
    x, _ = data.take(torch.arange(2))
    assert input_shape(data) == (3, 4, 5) == tuple(x.shape[1:])
    assert_close(standardise(torch.zeros(2, 3, 4, 5), data), x.contiguous())
    assert standardise(torch.ones(1, 3, 1, 1), data).flatten().tolist() == [1.0, 3.0, 0.5]
    table = Data(torch.zeros(2, 6), tensor([0, 1]), torch.arange(2))
    assert input_shape(table) == (6,)
    assert_close(standardise(torch.ones(2, 6), table), torch.ones(2, 6))


def test_batches_are_endless_complete_and_reshuffled() -> None:
    """10 samples in batches of 4: two a pass, the last two of a pass left out; every sample comes in some pass."""
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    got = list(islice(endless_batches(x, y, 4, seeded(0)), 40))
    assert all(len(labels) == 4 and torch.equal(xs[:, 0].long(), labels) for xs, labels in got)
    passes = [torch.cat([a, b]).tolist() for (_, a), (_, b) in zip(got[::2], got[1::2], strict=True)]
    assert all(len(set(one)) == 8 for one in passes)
    assert len({tuple(one) for one in passes}) == 20
    assert {i for one in passes for i in one} == set(range(10))


def test_a_set_smaller_than_a_batch_is_taken_whole() -> None:
    got = list(islice(endless_batches(torch.zeros(3, 1), torch.arange(3), 64, seeded(0)), 3))
    assert [sorted(labels.tolist()) for _, labels in got] == [[0, 1, 2]] * 3


# distances to prototypes: FedPG's Eq. 6 to 9


def test_squares_are_times_tau_and_norms_are_over_tau() -> None:
    """z = (.5, .5): |z - P'|^2 = (.5, 2.5, .5)."""
    assert_close(scaled_distances(Z, VIRTUAL, 2.0, "squared"), tensor([[1.0, 5.0, 1.0]]).double())
    assert_close(scaled_distances(Z, VIRTUAL, 2.0, "norm"), tensor([[0.5, 2.5, 0.5]]).double().sqrt() / 2)


def test_the_distance_based_cross_entropy_on_numbers() -> None:
    """2 * .5 + log(2 e^-1 + e^-5) = .702263; with norms over 2: .973034."""
    assert 1 + math.log(2 * math.exp(-1) + math.exp(-5)) == pytest.approx(0.702263, abs=1e-6)
    assert distance_cross_entropy(Z, Y, VIRTUAL, 2.0).item() == pytest.approx(0.702263, abs=1e-6)
    assert distance_cross_entropy(Z, Y, VIRTUAL, 2.0, "norm").item() == pytest.approx(0.973034, abs=1e-6)


def test_anchoring_on_numbers() -> None:
    """Over the two received .063464; with zeros for the third, as in the authors' code, 1.442776; norms .865466 / 2."""
    assert anchoring(VIRTUAL, P, KNOWN, 2.0).item() == pytest.approx(0.063464, abs=1e-6)
    code = distance_cross_entropy(VIRTUAL[:2], torch.arange(2), P, 2.0)
    assert code.item() == pytest.approx(1.442776, abs=1e-6)
    assert anchoring(VIRTUAL, P, KNOWN, 2.0, "norm").item() == pytest.approx(0.865466 / 2, abs=1e-6)


def test_anchoring_one_class_is_its_squared_distance_and_no_class_is_zero() -> None:
    """|(0, 2) - (0, 4)|^2 = 4; the log of Eq. 7 would be 0 wherever P'_1 is."""
    moving = VIRTUAL.clone().requires_grad_()
    loss = anchoring(moving, P, tensor([False, True, False]), 2.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 4
    assert_close(moving.grad, tensor([[0.0, 0.0], [0.0, -4.0], [0.0, 0.0]]).double())
    assert anchoring(VIRTUAL, P, tensor([False] * 3), 2.0).item() == 0


def test_far_prototypes_and_features_on_a_prototype_stay_finite() -> None:
    far = (1e4 * VIRTUAL).requires_grad_()
    z = torch.cat([far.detach()[:1], Z]).requires_grad_()
    for distance in ("squared", "norm"):
        loss = distance_cross_entropy(z, tensor([0, 1]), far, 2.0, distance)
        grads: tuple[Tensor, ...] = torch.autograd.grad(loss, (z, far))
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in grads)


def test_the_gradient_of_the_squares_is_that_of_differences() -> None:
    """The way through the root and back: d/dz of 2 |z - P'|^2 is 4 (z - P')."""
    z = Z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(scaled_distances(z, VIRTUAL, 2.0, "squared").sum(), z)
    assert_close(grad, 4 * (Z - VIRTUAL).sum(0, keepdim=True))


def test_nearest_is_own_counts_known_classes_alone() -> None:
    """Of (2, 1) and (0, 4) the nearest are 0, 0, 1, 0; class 2 has none, nearer as its zeros are."""
    z = tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 5.0], [0.4, 0.2], [0.0, 0.0]])
    found = nearest_is_own(z, tensor([0, 1, 1, 0, 2]), Tensors(mean=P.float(), count=KNOWN.float()))
    assert found == 3 / 4
