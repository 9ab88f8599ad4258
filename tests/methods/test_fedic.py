"""FEDIC: client weights, calibration and lesson on numbers; what it keeps; its settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fedskew.core.method import mean_of, model_of
from fedskew.core.tensors import Tensors
from fedskew.federation.wire import digest
from fedskew.methods import fedic
from fedskew.methods._shared import distillation
from fedskew.methods._shared.distillation import mean_features, on_server, predict, train_model, train_student
from fedskew.methods.fedic import ADAM, CALIBRATION, FEDIC, ensembled, weighted_logits
from helpers.public import after, arrived, server_site, small
from toys import rounds, same

FEW = FEDIC(steps=3, distil_steps=3, batch=8, distil_batch=16)
C2 = Tensors(
    s=torch.ones(2), s_0=torch.zeros(1), a=torch.ones(2), b=torch.zeros(2), v=torch.zeros(3), v_0=torch.zeros(1)
)
LOGITS = tensor([[[2.0, 0.0], [0.0, 1.0]]])  # one sample, two clients


def test_clients_are_weighted_sample_by_sample() -> None:
    """sigmoid(2) = .880797, sigmoid(1) = .731059: shares (.546449, .453551)."""
    assert_close(weighted_logits(C2, LOGITS), tensor([[1.0928982063, 0.4535508968]]))
    both = torch.cat([LOGITS, LOGITS.flip(1)])
    assert_close(weighted_logits(C2, both), weighted_logits(C2, LOGITS).expand(2, 2))


def test_weights_are_finite_where_no_client_is_sure_of_a_sample() -> None:
    """sigmoid(-200) and sigmoid(-300) are 0 in single precision, 0 / 0 is not a number; their ratio is e^100."""
    logits = tensor([[[-150.0, -50.0], [-160.0, -140.0]]])  # one sample, two clients
    c = {"s": torch.ones(2), "s_0": torch.zeros(1)}
    assert_close(weighted_logits(c, logits), tensor([[-150.0, -50.0]]))


def test_the_ensemble_on_numbers() -> None:
    """Gate .5 with z_cr (1, 1); with b_0 large the weights are even; the gate has a bias."""
    z_cr, features = torch.ones(1, 2), torch.zeros(1, 3)
    assert_close(ensembled(C2, LOGITS, z_cr, features), tensor([[1.0464491032, 0.7267754484]]))
    assert_close(weighted_logits(C2 | {"s_0": tensor([50.0])}, LOGITS), tensor([[1.0, 0.5]]))
    shut = ensembled(C2 | {"v_0": tensor([-50.0])}, LOGITS, z_cr, features)
    assert_close(shut, z_cr)
    scaled = C2 | {"a": tensor([2.0, 3.0]), "b": tensor([0.5, -0.5]), "v_0": tensor([50.0])}
    assert_close(ensembled(scaled, LOGITS, z_cr, features), tensor([[2.6857964126, 0.8606526904]]))
    gate = C2 | {"v": tensor([1.0, -1.0, 0.0])}
    assert_close(ensembled(gate, LOGITS, z_cr, tensor([[60.0, 0.0, 9.0]])), weighted_logits(C2, LOGITS))


def test_the_lesson_on_numbers() -> None:
    """KL between softmax((1.0464, .7268) / 2) and even halves: .003183307; no T^2."""
    teacher, student, y = tensor([[1.0464491032, 0.7267754484]]).double(), torch.zeros(1, 2).double(), tensor([0])
    soft = float(FEDIC(ld=1.0).distillation_loss(student, teacher, y))
    assert soft == pytest.approx(0.003183307, abs=1e-8)
    hard = float(cross_entropy(student, y))
    assert float(FEDIC(ld=0.25).distillation_loss(student, teacher, y)) == pytest.approx(0.25 * soft + 0.75 * hard)


def test_a_round_is_rebalancing_then_calibration_then_distillation() -> None:
    """Its parts one after the other, with the same generator."""
    _, server, sent = arrived()
    site, w_g = server_site(), mean_of(sent)
    predictions = [predict(site, model_of(u.payload)) for u in sent]
    adam: dict[str, Any] = {"optimiser": "adam", "lr": 0.001, "weight_decay": 2e-4}
    w_cr = train_model(site, w_g, site.loss, on_server(site, batch_size=8, **adam), 3)
    z_cr, z, f = predict(site, w_cr).logits, torch.stack([v.logits for v in predictions], 1), mean_features(predictions)
    made = after(FEW)
    y = site.data.labels
    order = [torch.randperm(40, generator=site.rng)[:24].split(8)]
    c = {name: t.clone().requires_grad_() for name, t in FEW.init_server(server_site())[CALIBRATION].items()}
    optimiser = torch.optim.Adam(c.values(), lr=0.001)
    for row in order[0]:
        optimiser.zero_grad()
        cross_entropy(ensembled(c, z[row], z_cr[row], f[row]), y[row]).backward()
        optimiser.step()
    assert_close(dict(made[CALIBRATION]), {name: t.detach() for name, t in c.items()})
    teacher = ensembled(made[CALIBRATION], z, z_cr, f)
    student = train_student(site, w_g, teacher, FEW.distillation_loss, on_server(site, batch_size=16, **adam), 3)
    assert same(model_of(made), student)
    assert server.keys() == made.keys()


def test_calibration_and_its_moments_live_on() -> None:
    records, _ = rounds(small(FEW), 2, cohorts=[[0, 1], [2, 3, 4]])
    assert [float(r.server[ADAM]["step"]) for r in records] == [3.0, 6.0]
    one, two = (r.server[CALIBRATION] for r in records)
    assert all(not torch.equal(one[name], two[name]) for name in one)


def test_frozen_models_see_d0_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    for module in (fedic, distillation):
        monkeypatch.setattr(module, "predict", lambda site, model: seen.append(model) or predict(site, model))
    after(FEW)
    assert len(seen) == 4  # three clients and w_cr


ON: dict[str, Any] = {
    "ld": 0.1,
    "T": 1.0,
    "steps": 1,
    "distil_steps": 1,
    "lr": 0.01,
    "weight_decay": 1.0,
    "batch": 40,
    "distil_batch": 5,
}


@pytest.mark.parametrize("name", ON)
def test_every_setting_changes_the_result(name: str) -> None:
    assert set(ON) == {field.name for field in fields(FEDIC)}
    assert digest(after(replace(FEW, **{name: ON[name]}))) != digest(after(FEW))
