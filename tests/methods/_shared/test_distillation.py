"""Predictions of frozen models on the server's public set, and how long students learn from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from fedskew.core.training import Training
from fedskew.methods._shared.distillation import predict, predict_all, student_steps
from fedskew.methods.fedddc import FedDDC
from fedskew.methods.feddf import FedDF
from fedskew.methods.fedic import FEDIC
from helpers.public import after, server_site
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
