"""FedDF: the teacher on numbers, the student by hand, labels that do not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import tensor
from torch.nn.functional import kl_div
from torch.testing import assert_close

from fedskew.core.method import mean_of, model_of
from fedskew.federation.wire import digest
from fedskew.methods._shared.distillation import imitate, predict
from fedskew.methods.feddf import FedDF, average_logits
from helpers.public import after, arrived, server_site

FEW = FedDF(steps=3, batch=40)
TEACHERS = tensor([[[2.0, 0.0]], [[0.0, 1.0]]]).double()


@pytest.mark.parametrize(("average", "expected"), [("logits", 0.03029986198), ("probabilities", 0.01125308348)])
def test_the_teacher_is_the_mean_of_the_clients(average: Any, expected: float) -> None:
    """Logits (1, .5): p .622459; probabilities (.880797 + .268941) / 2 = .574869. KL against even halves."""
    teacher = average_logits(TEACHERS, average)
    assert float(imitate(torch.zeros(1, 2).double(), teacher, tensor([0]))) == pytest.approx(expected, abs=1e-9)


def test_large_logits_stay_finite() -> None:
    assert average_logits(1e4 * TEACHERS, "probabilities").softmax(1).tolist() == [[0.5, 0.5]]


def test_the_student_is_fedavg_s_model_after_adam_on_the_clients_mean() -> None:
    """Batches of all of D0: three steps of torch's Adam by hand, the gradient clipped."""
    world, _, sent = arrived()
    for clip in (0.01, None):
        made, site = after(replace(FEW, clip=clip, lr=0.01)), server_site()
        teacher = torch.stack([predict(site, model_of(u.payload)).logits for u in sent]).mean(0).softmax(1)
        x, _ = site.data.take(torch.arange(40))
        net = world.make_net()
        net.load_state_dict(mean_of(sent)["parameters"])
        adam = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(3):
            adam.zero_grad()
            kl_div(net(x).log_softmax(1), teacher, reduction="batchmean").backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            adam.step()
        wanted = {n: p.detach() for n, p in net.named_parameters()}
        assert_close(dict(made["parameters"]), wanted, atol=1e-5, rtol=1e-4)


def test_labels_of_d0_and_samples_of_clients_do_not_count_for_the_teacher() -> None:
    _, server, sent = arrived()
    blind = server_site()
    blind = replace(blind, data=replace(blind.data, y=torch.zeros_like(blind.data.y)))
    assert digest(FEW.aggregate(blind, server, iter(sent))) == digest(after(FEW) | server_extras(server))
    heavy = [replace(u, weight=7.0) for u in sent]
    even = FEW.aggregate(server_site(), server, iter(heavy))
    uneven = FEW.aggregate(server_site(), server, iter([*heavy[:2], replace(heavy[2], weight=9.0)]))
    assert digest(even) != digest(uneven)  # the student starts elsewhere


def server_extras(server: Any) -> Any:
    return {group: server[group] for group in server if group not in ("parameters", "buffers")}


@pytest.mark.parametrize(
    "settings", [{"steps": 1}, {"lr": 0.1}, {"batch": 7}, {"clip": 1e-3}, {"average": "probabilities"}]
)
def test_every_setting_changes_the_result(settings: dict[str, Any]) -> None:
    assert digest(after(replace(FEW, **settings))) != digest(after(FEW))
