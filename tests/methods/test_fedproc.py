"""FedProc: the contrast on numbers, its share by round, the prototypes' way through a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import cross_entropy, normalize
from torch.testing import assert_close

from fedskew.core.method import mean_of, model_of
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.prototypes import GROUP, class_means
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedproc import FedProc, prototype_contrast
from helpers.nets import normed, received, work
from toys import digits, rounds, same

Z, P, Y = tensor([[2.0, 0.0]]).double(), tensor([[1.0, 0.0], [0.0, 3.0]]).double(), tensor([0])
PCDD = "pcdd:clients=5,classes=2"


def test_the_contrast_on_numbers() -> None:
    """z (2, 0) against (1, 0), (0, 1): logits (2, 0), log(1 + e^-2). With |z| = 1: log(1 + e^-1)."""
    assert prototype_contrast(Z, Y, P).item() == pytest.approx(0.126928011, abs=1e-9)
    assert prototype_contrast(normalize(Z), Y, P).item() == pytest.approx(0.3132616875, abs=1e-9)


def test_a_class_without_prototype_has_the_logit_0() -> None:
    """Logits (2, 0) again; as the true class it costs 2 + log(1 + e^-2), and its gradient leads away from P_0."""
    only = tensor([[5.0, 0.0], [0.0, 0.0]]).double()
    z = Z.clone().requires_grad_()
    assert prototype_contrast(z, Y, only).item() == pytest.approx(0.126928011, abs=1e-9)
    loss = prototype_contrast(z, tensor([1]), only)
    assert loss.item() == pytest.approx(2.126928011, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, z)
    assert_close(gradient, tensor([[0.8807970780, 0.0]]).double())


def test_only_the_direction_of_a_prototype_counts() -> None:
    rng = torch.Generator().manual_seed(0)
    z, p, y = torch.randn(6, 4, generator=rng), torch.randn(3, 4, generator=rng), torch.arange(6) % 3
    assert_close(prototype_contrast(z, y, p * tensor([[0.1], [1.0], [9.0]])), prototype_contrast(z, y, p))
    logits = torch.stack([z @ c / c.norm() for c in p], 1)
    assert_close(prototype_contrast(z, y, p), cross_entropy(logits, y))


def by_hand(z: Tensor, method: FedProc) -> Tensor:
    return z / z.norm(dim=1, keepdim=True) if method.normalise_z else z


@pytest.mark.parametrize("normalise_z", [False, True])
@pytest.mark.parametrize(("round", "T", "share"), [(1, 100, 0.01), (25, 100, 0.25), (30, 40, 0.75)])
def test_the_share_of_the_cross_entropy_grows_by_round(round: int, T: int, share: float, normalise_z: bool) -> None:
    method = FedProc(normalise_z=normalise_z)
    records, simulation = rounds(digits(method), 1)
    site = replace(simulation.world.site(1, 1, "train"), round=round, rounds=T)
    broadcast = method.broadcast(records[0].server)
    site.load()
    x, y = site.data.take(torch.arange(16))
    z = site.net.body(x)
    ce = cross_entropy(site.net.head(z), y)
    contrast = prototype_contrast(by_hand(z, method), y, broadcast[GROUP]["mean"])
    assert_close(method.objective(site, broadcast, {})(site.net, x, y), share * ce + (1 - share) * contrast)


def test_the_mix_on_numbers() -> None:
    """t = 25 of 100, CE .5, z and P as above: .25 * .5 + .75 * .126928011 = .2201960083."""

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Identity(), torch.nn.Identity()

    site = digits(FedProc()).site(0, 0, "train")
    site = replace(site, round=25, rounds=100, loss=lambda net, x, y: tensor(0.5))
    prototypes = {GROUP: Tensors(mean=P, count=torch.ones(2))}
    loss = FedProc().objective(site, prototypes, {})
    assert loss(Given(), Z, Y).item() == pytest.approx(0.2201960083, abs=1e-9)


def test_round_0_is_fedavg_bit_for_bit_and_round_1_is_not() -> None:
    ours, _ = rounds(digits(FedProc()), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert same(model_of(ours[0].server), model_of(plain[0].server))
    assert not same(model_of(ours[1].server), model_of(plain[1].server))


def test_prototypes_are_class_means_under_each_trained_model_pooled_by_samples() -> None:
    """Evaluation mode: with batch norm, the statistics are the trained model's. The model's mean is FedAvg's."""
    world = normed(FedProc())
    start = received(world)
    updates = [work(world, c, 0, start, {}).update for c in range(5)]
    total, count = torch.zeros_like(start[GROUP]["mean"]), torch.zeros(10)
    for client, update in enumerate(updates):
        site = world.site(client, 0, "train")
        z = site.infer(site.frozen(model_of(update.payload)).body)
        assert_close(update.payload[GROUP], class_means(z, site.data.labels, 10))
        total = total.index_add(0, site.data.labels, z)
        count += torch.bincount(site.data.labels, minlength=10)
    records, _ = rounds(world, 1)
    assert_close(records[0].server[GROUP]["mean"], total / count[:, None], rtol=1e-4, atol=1e-5)
    assert torch.equal(records[0].server[GROUP]["count"], count)
    assert same(model_of(records[0].server), mean_of(updates))


def test_a_class_not_sent_keeps_its_prototype_and_one_never_sent_is_zero() -> None:
    """Clients 0 and 1 of disjoint classes take turns. Client 1 is contrasted with client 0's classes alone."""
    records, simulation = rounds(digits(FedProc(), split=PCDD), 2, cohorts=[[0], [1]])
    plain, _ = rounds(digits(FedAvg(), split=PCDD), 2, cohorts=[[0], [1]])
    first, second = (r.server[GROUP] for r in records)
    held = [torch.bincount(simulation.world.site(c, 0, "train").data.labels, minlength=10) > 0 for c in (0, 1)]
    assert torch.equal(second["mean"][held[0]], first["mean"][held[0]])
    assert torch.equal(second["count"] > 0, held[0] | held[1])
    assert not second["mean"][~(held[0] | held[1])].any()
    assert all(t.isfinite().all() for ts in records[1].server.values() for t in ts.values())
    assert not same(model_of(records[1].server), model_of(plain[1].server))


def test_prototypes_cost_d_numbers_a_class_and_its_count_both_ways() -> None:
    """mlp: d = 200, C = 10, 5 clients, 4 bytes."""
    records, _ = rounds(digits(FedProc()), 1)
    assert records[0].bytes_up[GROUP] == records[0].bytes_down[GROUP] == 5 * 4 * 10 * (200 + 1)
