"""FedBE: the posterior and the sharpened teacher on numbers, SWA, who is in the ensemble."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.core.method import Update, mean_of, model_of
from fedskew.core.seeding import seeded
from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.wire import digest
from fedskew.methods._shared import distillation
from fedskew.methods._shared.distillation import imitate, on_server, predict, train_student
from fedskew.methods.fedbe import FedBE, draw_dirichlet, draw_gaussian, sharpened, weight_variance
from helpers.public import after, arrived, server_site
from toys import same

FEW = FedBE(M=2, epochs=3, swa=2, batch=16, lr=0.05)


def sent_w(value: float, weight: float) -> Update:
    return Update({"parameters": Tensors(w=tensor([value]).double())}, weight)


PAIR = [sent_w(1.0, 1.0), sent_w(3.0, 3.0)]


def test_the_gaussian_has_the_clients_mean_and_variance() -> None:
    """w (1, 3), p (1/4, 3/4): mu 2.5, var .75; at eps = 1 the draw is 3.366025."""
    mu = mean_of(PAIR)["parameters"]
    var = weight_variance(PAIR, mu)
    assert (float(mu["w"]), float(var["w"])) == pytest.approx((2.5, 0.75))
    eps = float(torch.randn(1, generator=seeded(5), dtype=torch.float64))
    drawn = float(draw_gaussian(mu, var, 1.0, seeded(5))["w"])
    assert drawn == pytest.approx(2.5 + 0.75**0.5 * eps)
    assert 2.5 + (drawn - 2.5) / eps == pytest.approx(3.366025404)
    assert float(draw_gaussian(mu, var, 0.1, seeded(5))["w"]) == pytest.approx(2.5 + 0.1 * (drawn - 2.5))
    assert float(draw_gaussian(mu, var, 0.0, seeded(5))["w"]) == 2.5


def test_the_dirichlet_mixes_the_clients() -> None:
    """Shares (g, 1 - g) give 3 - 2g: (.4, .6) is 2.2. Many draws have the mean 2, a small alpha sits at the ends."""
    rng = seeded(0)
    draws = torch.tensor([float(draw_dirichlet(PAIR, 1.0, rng)["w"]) for _ in range(400)])
    assert ((draws > 1) & (draws < 3)).all()
    assert float(draws.mean()) == pytest.approx(2.0, abs=0.1)
    assert float(draws.var()) == pytest.approx(1 / 3, abs=0.06)
    rng = seeded(0)
    ends = torch.tensor([float(draw_dirichlet(PAIR, 0.01, rng)["w"]) for _ in range(100)])
    assert float(((ends < 1.1) | (ends > 2.9)).float().mean()) > 0.9


def test_the_teacher_is_sharpened_after_the_mean() -> None:
    """Probabilities (.8, .2) and (.4, .6): mean (.6, .4), squared and normalised (.692308, .307692)."""
    members = [tensor([[0.8, 0.2]]).log(), tensor([[0.4, 0.6]]).log() + 3]
    assert_close(sharpened(members, 0.5).softmax(1), tensor([[0.6923076923, 0.3076923077]]))
    assert_close(sharpened(members, 1.0).softmax(1), tensor([[0.6, 0.4]]))


def test_the_ensemble_is_mu_the_clients_and_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, sent = arrived()
    seen: list[Payload] = []
    monkeypatch.setattr(distillation, "predict", lambda site, model: seen.append(model) or predict(site, model))
    after(FEW)
    assert same(seen[0], mean_of(sent))
    assert all(same(a, model_of(u.payload)) for a, u in zip(seen[1:4], sent, strict=True))
    mu = mean_of(sent)["parameters"]
    var, rng = weight_variance(sent, mu), server_site().rng
    for model in seen[4:]:
        assert_close(dict(model["parameters"]), dict(draw_gaussian(mu, var, 0.1, rng)))
    assert len(seen) == 6


def test_what_is_sent_is_the_mean_of_the_last_students() -> None:
    """Three epochs, the last two averaged."""
    _, _, sent = arrived()
    site, student = server_site(), mean_of(sent)
    none = replace(FEW, M=0)
    teacher = sharpened([predict(site, m).logits for m in (student, *(model_of(u.payload) for u in sent))], 0.5)
    training = on_server(site, lr=0.05, epochs=1, momentum=0.9, weight_decay=1e-5, batch_size=16)
    students = []
    for _ in range(3):
        student = train_student(site, student, teacher, imitate, training)
        students.append(student)
    assert same(model_of(after(none)), mean_of(Update(m, 1.0) for m in students[1:]))
    assert same(model_of(after(replace(none, swa=1))), students[-1])
    assert same(model_of(after(replace(none, swa=9))), mean_of(Update(m, 1.0) for m in students))


ON: dict[str, Any] = {
    "posterior": "dirichlet",
    "M": 1,
    "scale": 1.0,
    "alpha": 0.1,
    "T": 1.0,
    "epochs": 2,
    "swa": 1,
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.1,
    "batch": 40,
}


@pytest.mark.parametrize("name", ON)
def test_every_setting_changes_the_result(name: str) -> None:
    assert set(ON) == {field.name for field in fields(FedBE)}
    base = replace(FEW, posterior="dirichlet") if name == "alpha" else FEW
    assert digest(after(replace(base, **{name: ON[name]}))) != digest(after(base))
