"""Predictions of frozen models on the server's public set."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from fedskew.core.training import Training
from fedskew.methods._shared.distillation import predict, predict_all
from fedskew.methods.feddf import FedDF
from toys import digits


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
