"""CReFF: gradients and their distance on numbers and against autograd, who trains what, what travels."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from fedskew.core.method import model_of
from fedskew.core.samples import Data
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.methods._shared.heads import as_trained
from fedskew.methods.creff import FEATURES, GRADIENTS, TRAINED, CReFF, federated, gradients, head_of, mismatch
from fedskew.methods.fedavg import FedAvg
from helpers.nets import two_layers
from helpers.public import small
from toys import digits, rounds, same

FEW = CReFF(per_class=3, match=5, epochs=2)
ZERO = Tensors(weight=torch.zeros(2, 2), bias=torch.zeros(2))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_gradients_on_numbers() -> None:
    """W = b = 0, h (1, 0) of class 0: p - e = (-.5, .5); weight [[-.5, 0], [.5, 0]], bias (-.5, .5). Class 1: none."""
    g = gradients(tensor([[1.0, 0.0]]), tensor([0]), ZERO)
    assert g["mean"].view(2, 2, 3)[0].tolist() == [[-0.5, 0.0, -0.5], [0.5, 0.0, 0.5]]
    assert g["mean"][1].tolist() == [0.0] * 6
    assert g["count"].tolist() == [1.0, 0.0]


def test_the_distance_on_numbers() -> None:
    """Real (1, 0), federated (1, 1): two rows at 45 degrees, 2 - sqrt 2 = .585786, biases agree; 1e-6 is added."""
    real = gradients(tensor([[1.0, 0.0]]), tensor([0]), ZERO)["mean"]
    made = federated(tensor([[[1.0, 1.0]], [[9.0, 9.0]]]), ZERO)
    nothing = 3.0  # of class 1: two rows and a bias at no angle
    assert float(mismatch(real.double(), made.double(), 2)) == pytest.approx(0.5857924376 + nothing, abs=1e-9)
    assert float(mismatch(real, real, 2)) == pytest.approx(nothing, abs=2e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_autograd(bias: bool) -> None:
    head = Tensors(weight=normal(0, 3, 4)) | ({"bias": normal(1, 3)} if bias else {})
    h, y = normal(2, 7, 4), tensor([0, 2, 2, 0, 0, 2, 0])
    g = gradients(h, y, head)
    assert g["count"].tolist() == [4.0, 0.0, 3.0]
    for c in (0, 2):
        own = {name: t.clone().requires_grad_() for name, t in head.items()}
        cross_entropy(linear(h[y == c], own["weight"], own.get("bias")), y[y == c]).backward()
        columns = [own["weight"].grad, *([own["bias"].grad[:, None]] if bias else [])]  # type: ignore[index]
        assert_close(g["mean"][c].view(3, -1), torch.cat(columns, 1))  # type: ignore[arg-type]
    each = normal(3, 3, 2, 4)
    labels = torch.arange(3).repeat_interleave(2)
    assert_close(federated(each, head), gradients(each.flatten(0, 1), labels, head)["mean"])


def test_the_distance_is_over_rows_and_the_bias_as_one_more() -> None:
    a, b = normal(0, 3, 12), normal(1, 3, 12)
    total = 0.0
    for c in range(3):
        real, made = a[c].view(3, 4), b[c].view(3, 4)
        pairs = [(real[r, :3], made[r, :3]) for r in range(3)] + [(real[:, 3], made[:, 3])]
        total += sum(1 - float(torch.cosine_similarity(p, q, dim=0)) for p, q in pairs)
    assert float(mismatch(a, b, 3)) == pytest.approx(total, abs=1e-4)


def test_a_gradient_of_zeros_has_no_direction_and_no_nan() -> None:
    h = torch.zeros(2, 1, 2, requires_grad=True)
    loss = mismatch(torch.zeros(2, 6), federated(h, ZERO), 2)
    loss.backward()
    assert h.grad is not None
    assert h.grad.isfinite().all()


COHORTS = [[0, 1], [1, 2, 3], [0, 4]]


def test_training_is_fedavg_s_bit_for_bit_whatever_is_deployed() -> None:
    ours, _ = rounds(small(FEW), 3, cohorts=COHORTS)
    plain, _ = rounds(small(FedAvg()), 3, cohorts=COHORTS)
    for a, b in zip(ours, plain, strict=True):
        assert same(model_of(as_trained(a.server)), b.server)
        assert not torch.equal(a.server["parameters"]["head.weight"], b.server["parameters"]["head.weight"])
        assert a.training == b.training


def test_a_client_s_gradients_are_in_the_head_it_received_on_the_body_it_received() -> None:
    world = small(FEW)
    (record,), _ = rounds(world, 1, cohorts=[[0, 1]])
    broadcast = FEW.broadcast(record.server)
    update, _ = FEW.client(world.site(2, 1, "train"), broadcast, {})
    site = world.site(2, 1, "train")
    net = world.make_net()
    net.load_state_dict(broadcast["parameters"])
    assert torch.equal(net.head.weight, record.server["parameters"]["head.weight"])
    x, y = site.data.take(torch.arange(len(site.data)))
    with torch.no_grad():
        wanted = gradients(net.body(x), y, head_of(broadcast))
    assert_close(dict(update.payload[GRADIENTS]), dict(wanted))


def scene() -> tuple[Any, Payload, list[Any]]:
    world = small(FEW)
    server = FEW.init_server(world.server_site(0, "init"))
    sent = [FEW.client(world.site(c, 0, "train"), FEW.broadcast(server), {})[0] for c in (0, 2)]
    return world, server, sent


def test_features_step_towards_the_plain_mean_of_those_that_have_the_class() -> None:
    """One step of SGD by hand, on the mean over clients that have the class, not by samples."""
    world, server, sent = scene()
    method = replace(FEW, match=1)
    made = method.aggregate(world.server_site(0, "train"), server, iter(sent))
    own = [u.payload[GRADIENTS] for u in sent]
    counts = torch.stack([g["count"] for g in own])
    assert not torch.equal(counts[0], counts[1])
    assert counts.min() == 0
    none = torch.zeros(1, 130)
    real = torch.stack(
        [torch.stack([g["mean"][c] for g in own if g["count"][c]] or [none[0]]).mean(0) for c in range(10)]
    )
    h = server[FEATURES]["h"].clone().requires_grad_()
    mismatch(real, federated(h, head_of(server)), 12).backward()
    assert h.grad is not None
    assert_close(made[FEATURES]["h"], (h - 0.1 * h.grad).detach())


def test_a_class_that_no_client_has_keeps_its_features() -> None:
    world, server, sent = scene()
    lacking = []
    for update in sent:
        g = update.payload[GRADIENTS]
        none = Tensors(mean=g["mean"].index_fill(0, tensor([4]), 0.0), count=g["count"].index_fill(0, tensor([4]), 0.0))
        lacking.append(update.plus(**{GRADIENTS: none}))
    made = FEW.aggregate(world.server_site(0, "train"), server, iter(lacking))[FEATURES]["h"]
    still = [c for c in range(10) if torch.equal(made[c], server[FEATURES]["h"][c])]
    absent = sum(u.payload[GRADIENTS]["count"] for u in lacking) == 0
    assert still == absent.nonzero().flatten().tolist()
    assert 4 in still


def test_matching_brings_the_gradients_together() -> None:
    world, server, sent = scene()
    g, head, h = sent[0].payload[GRADIENTS], head_of(server), server[FEATURES]["h"]
    moved = replace(FEW, match=100).matched(world.server_site(0, "train"), h, head, g["mean"])
    absent = 11.0 * int((g["count"] == 0).sum())  # ten rows and a bias at no angle
    far, near = (float(mismatch(g["mean"], federated(each, head), 12)) - absent for each in (h, moved))
    assert near < 0.6 * far


def test_the_head_is_trained_afresh_on_the_features() -> None:
    """Features at ten corners: after 0 epochs the head has its initial values, after many it separates the classes."""
    site = small(FEW).server_site(0, "train")
    h = 3 * torch.eye(10, 12)[:, None].expand(10, 3, 12).contiguous()
    y = torch.arange(10).repeat_interleave(3)
    drawn = FEW.new_head(small(FEW).server_site(0, "train"))
    assert_close(dict(replace(FEW, epochs=0).retrained(site, h)), dict(drawn))
    assert float(drawn["head.weight"].abs().max()) <= 12**-0.5
    assert float(drawn["head.weight"].std()) == pytest.approx((1 / 36) ** 0.5, rel=0.15)
    head = replace(FEW, epochs=60, lr=0.5).retrained(site, h)
    assert torch.equal(linear(h.flatten(0, 1), head["head.weight"], head["head.bias"]).argmax(1), y)


@pytest.mark.parametrize("batch", [4, 30, 64])
def test_the_head_s_fast_steps_are_fit_s_bit_for_bit(batch: int) -> None:
    """30 features: batches of 4 leave one of 2, one of 30 is all of them, and so is one of 64."""
    world, h = small(FEW), normal(0, 10, 3, 12)
    method = replace(FEW, epochs=7, lr=0.3, batch=batch)
    fast = method.retrained(world.server_site(0, "train"), h)
    plain = method.retrained(replace(world.server_site(0, "train"), loss=lambda net, x, y: cross_entropy(net(x), y)), h)
    assert same({"parameters": fast}, {"parameters": plain})


def test_the_head_s_fast_steps_draw_what_fit_draws() -> None:
    world, h = small(FEW), normal(0, 10, 3, 12)
    sites = [world.server_site(0, "train"), replace(world.server_site(0, "train"), fast=False)]
    for site in sites:
        FEW.retrained(site, h)
    assert torch.equal(sites[0].rng.get_state(), sites[1].rng.get_state())


def test_what_is_tested_is_the_body_with_the_re_trained_head() -> None:
    world = small(FEW)
    simulation = Simulation(world)
    *_, record = run(FEW, simulation, world.server_site, 2, lambda round: [0, 1, 2])
    plain, _ = rounds(small(FedAvg()), 2, cohorts=[[0, 1, 2]] * 2)
    net = world.make_net()
    net.load_state_dict(plain[-1].server["parameters"])
    net.head.load_state_dict(head_of(record.server))
    data = Data(world.x_test, world.y_test, torch.arange(len(world.y_test)), world.mean, world.std)
    x, y = data.take(torch.arange(len(data)))
    assert record.metrics is not None
    assert record.metrics.global_.accuracy == pytest.approx(float((net(x).argmax(1) == y).float().mean()))


def test_a_head_travels_down_and_a_head_for_each_class_up() -> None:
    """hidden 12: (12 + 1) * 10 numbers of 4 bytes to each of 5 clients; ten times that and ten counts from each."""
    ours, _ = rounds(small(FEW), 2)
    plain, _ = rounds(small(FedAvg()), 2)
    for a, b in zip(ours, plain, strict=True):
        assert a.bytes_down == b.bytes_down | {TRAINED: 5 * 4 * 130}
        assert a.bytes_up == b.bytes_up | {GRADIENTS: 5 * 4 * (10 * 130 + 10)}


def test_a_head_of_two_layers_is_rejected() -> None:
    world = replace(digits(FEW), make_net=partial(two_layers, True))
    with pytest.raises(UsageError, match="one linear layer"):
        FEW.init_server(world.server_site(0, "init"))


def test_a_head_without_bias_works() -> None:
    def make() -> Any:
        net = small(FEW).make_net()
        net.head = nn.Linear(12, 10, bias=False)
        nn.init.constant_(net.head.weight, 0.1)
        return net

    records, _ = rounds(replace(small(FEW), make_net=make), 2)
    assert list(head_of(records[-1].server)) == ["weight"]
    assert records[-1].bytes_up[GRADIENTS] == 5 * 4 * (10 * 120 + 10)


ON: dict[str, Any] = {"per_class": 2, "match": 1, "match_lr": 0.5, "epochs": 1, "lr": 0.1, "batch": 4}


@pytest.mark.parametrize("name", ON)
def test_every_setting_changes_the_result(name: str) -> None:
    assert set(ON) == {field.name for field in fields(CReFF)}
    usual, changed = (rounds(small(m), 1)[0][0].server for m in (FEW, replace(FEW, **{name: ON[name]})))
    assert digest(model_of(changed)) != digest(model_of(usual))
