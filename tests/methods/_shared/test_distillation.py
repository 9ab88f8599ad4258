"""Predictions of frozen models on the server's public set, and how long students learn from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.core.fast.calibration import Frozen
from fedskew.core.method import Method, model_of
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.methods import fedddc, fedic
from fedskew.methods._shared.distillation import calibrate, no_moments, predict, predict_all, student_steps
from fedskew.methods.fedddc import FedDDC
from fedskew.methods.feddf import FedDF
from fedskew.methods.fedic import FEDIC
from helpers.public import after, arrived, server_site
from toys import digits, same


@pytest.mark.parametrize("policy", ["aggregate", "local"])
def test_predictions_of_several_models_have_the_same_bits_on_any_number_of_cores(
    policy: Literal["aggregate", "local"],
) -> None:
    """Threads that shared a net, or used several threads each, would change them."""
    training = Training(lr=0.1, batch_size=16, batch_norm=policy)
    world = digits(FedDF(), split="public:per_class=20+iid:clients=3", model="resnet8", training=training)
    models = [{g: t * (1 + 0.1 * k) for g, t in world.initial.items() if g == "parameters"} for k in range(5)]
    site, shared = world.server_site(0, "train"), {"buffers": world.initial["buffers"]}
    alone = [predict(site, model | shared) for model in models]
    for cores in (1, 2, 3):
        together = predict_all(replace(site, cores=cores), (model | shared for model in models))
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.logits, b.logits)
            assert torch.equal(a.features, b.features)
    assert not torch.equal(alone[0].logits, alone[1].logits)


@pytest.mark.parametrize(
    ("samples", "steps"), [(1000, 100), (2000, 100), (640, 63), (200, 25), (129, 25), (50, 13), (1, 13)]
)
def test_a_student_sees_a_small_public_set_as_often_as_the_published_one(samples: int, steps: int) -> None:
    """Batches of 128: 1,000 samples are 8 batches, 12.5 passes of them 100 steps; 50 are one batch, 12.5 passes 13."""
    site = server_site()
    data = replace(site.data, index=torch.zeros(samples, dtype=torch.int64))
    assert student_steps(replace(site, data=data), None, 128) == steps
    assert student_steps(replace(site, data=data), 40, 128) == 40
    assert student_steps(replace(site, data=data), 0, 128) == 0


def test_by_default_fedddc_and_fedic_limit_their_steps_to_the_public_set() -> None:
    """40 public samples: 3 batches of 16, so 38 steps; one batch of 128, so 13."""
    assert same(after(FedDDC(I=2, led_batch=16)), after(FedDDC(I=2, led_batch=16, J=38)))
    assert same(after(FedDDC(I=2, lam=1.0)), after(FedDDC(I=2, lam=1.0, J=13)))
    assert same(after(FEDIC(steps=2)), after(FEDIC(steps=2, distil_steps=13)))
    assert not same(after(FEDIC(steps=2)), after(FEDIC(steps=2, distil_steps=12)))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


FEATURES, Z_CR = normal(2, 40, 18), normal(3, 40, 10)
GATED = {"a": normal(4, 10), "b": normal(5, 10), "v": normal(6, 18)}
CASES: dict[str, tuple[dict[str, Tensor], Tensor, Callable[..., Tensor]]] = {
    "fedddc": (GATED, normal(1, 40, 10), lambda c, z, z_cr, f: fedddc.ensembled(c, fedddc.Inputs(z, z_cr, f))),
    "fedic": (
        {"s": normal(7, 10), "s_0": normal(8, 1)} | GATED | {"v_0": normal(9, 1)},
        3 * normal(1, 40, 5, 10),
        fedic.ensembled,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_calibration_with_its_derivative_written_out_is_that_of_autograd_bit_for_bit(case: str) -> None:
    """Batches of 16, 16 and 8; it continues from the moments of a first call, and nothing that it was given changes."""
    values, z, ensembled = CASES[case]
    start, site = Tensors(values), server_site()
    before = {name: t.clone() for name, t in start.items()}
    frozen = Frozen(z, Z_CR, FEATURES, site.data.labels)

    def loss(c: Mapping[str, Tensor], row: Tensor) -> Tensor:
        return cross_entropy(ensembled(c, *(t[row] for t in frozen[:3])), frozen.y[row])

    def twice(given: Frozen | None) -> list[Tensors]:
        site = server_site()
        c, moments = calibrate(site, start, no_moments(start), loss, given, lr=0.1, batch=16, steps=3)
        return [c, moments, *calibrate(site, c, moments, loss, given, lr=0.1, batch=16, steps=30)]

    with one_thread():
        for fast, plain in zip(twice(frozen), twice(None), strict=True):
            assert fast.keys() == plain.keys()
            assert [name for name in plain if not torch.equal(fast[name], plain[name])] == []
            assert all(t.shape == plain[name].shape and not t.requires_grad for name, t in fast.items())
    assert all(torch.equal(t, before[name]) for name, t in start.items())


@pytest.mark.parametrize("method", [FEDIC(steps=3, distil_steps=3), FedDDC(I=3, J=3), FedDF(steps=3, clip=None)])
def test_a_server_that_takes_the_plain_paths_ends_with_the_same_bits(method: Method) -> None:
    _, server, sent = arrived()
    site = replace(
        server_site(), fast=False, net=copy.deepcopy(server_site().net)
    )  # torch.optim drops gradients' views
    start = method.init_server(server_site()) | model_of(server)
    with one_thread():
        plain = method.aggregate(site, start, iter(sent))
        assert same(plain, after(method))
