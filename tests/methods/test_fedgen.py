"""FedGen: the ensemble's loss and diversity on numbers, who trains what, the client's two terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.testing import assert_close

from fedskew.core.fit import Fit
from fedskew.core.losses import imitation
from fedskew.core.method import mean_of, model_of
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.settings import UsageError
from fedskew.core.settings import build as settle
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.methods import fedgen
from fedskew.methods._shared.generators import GENERATOR, generator_from
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedgen import LABELS, FedGen, diversity, feature_generator, teachers_loss, with_parameters
from helpers.nets import normed, received, work
from toys import digits, rounds, same

SMALL = FedGen(alpha=10.0, beta=10.0, iterations=3, noise=4, hidden=8, generated=6)
PCDD = "pcdd:clients=5,classes=2"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(("noise", "hidden", "count"), [(32, 256, 19_744), (64, 512, 55_840)], ids=["mnist", "cifar"])
def test_the_generator_has_the_published_parameters(noise: int, hidden: int, count: int) -> None:
    """Of 32 features and 10 classes: (noise + 10 + 1) hidden + 2 hidden + (hidden + 1) 32."""
    made = feature_generator(noise, hidden, 32, 10)
    assert sum(p.numel() for p in made.parameters()) == count
    assert made(torch.rand(3, noise), tensor([0, 1, 9])).shape == (3, 32)


def test_diversity_on_numbers() -> None:
    """Noise (0, 0), (1, 1): mean square apart 1. Features 0, 2: mean apart 2. Mean over the four pairs 1: e^-1."""
    eps, z = tensor([[0.0, 0.0], [1.0, 1.0]]).double(), tensor([[0.0], [2.0]]).double()
    assert diversity(eps, z).item() == pytest.approx(0.3678794412, abs=1e-9)
    assert diversity(eps, 0 * z).item() == 1
    assert diversity(eps, tensor([[0.0, 1.0], [3.0, 0.0]]).double()).item() == pytest.approx(
        math.exp(-1)
    )  # (3 + 1) / 2


def test_the_ensemble_teaches_by_each_client_s_share_of_the_label() -> None:
    """y 0, w = (.75, .25), logits (2, 0) and (0, 0): .75 log(1 + e^-2) + .25 log 2 = .2684828034."""
    logits, w = tensor([[[2.0, 0.0]], [[0.0, 0.0]]]).double(), tensor([[0.75, 0.0], [0.25, 1.0]]).double()
    assert teachers_loss(logits, tensor([0]), w).item() == pytest.approx(0.2684828034, abs=1e-9)
    assert teachers_loss(logits, tensor([1]), w).item() == pytest.approx(math.log(2), abs=1e-9)


def test_the_cross_entropies_of_all_clients_at_once_are_those_of_each_bit_for_bit() -> None:
    rng = seeded(0)
    y, w = torch.arange(33) % 10, torch.rand(3, 10, generator=rng)
    logits = torch.randn(3, 33, 10, generator=rng).requires_grad_()
    each = torch.stack([cross_entropy(client, y, reduction="none") for client in logits])
    expected = (w[:, y] * each).sum(0).mean()
    made = teachers_loss(logits, y, w)
    assert torch.equal(made, expected)
    slopes = [torch.autograd.grad(loss, logits)[0] for loss in (made, expected)]
    assert torch.equal(*slopes)


def test_a_head_with_a_client_s_parameters_answers_as_the_client_s() -> None:
    head, client = nn.Linear(6, 3).requires_grad_(False), nn.Linear(6, 3).requires_grad_(False)
    kept, x = head.weight.clone(), torch.randn(5, 6)
    made = with_parameters(head, client.state_dict())
    assert torch.equal(made(x), client(x))
    assert torch.equal(head.weight, kept)
    assert not any(p.requires_grad for p in made.parameters())


def test_the_divergence_on_numbers() -> None:
    """KL(softmax(2, 0) || uniform) = .3278133255."""
    value = imitation(torch.zeros(1, 2).double(), tensor([[2.0, 0.0]]).double())
    assert value.item() == pytest.approx(0.3278133255, abs=1e-9)


def after_one_round(method: FedGen) -> tuple[Payload, Any]:
    records, simulation = rounds(digits(method, hidden="12"), 1)
    return method.broadcast(records[0].server), simulation.world


@pytest.mark.parametrize(
    ("changes", "round", "alpha", "beta"),
    [
        ({}, 0, 10.0, 10.0),
        ({}, 10, 8.170728069, 8.170728069),
        ({"alpha": 2.0}, 10, 1.634145614, 8.170728069),
        ({"alpha": 0.0}, 10, 0.0, 8.170728069),
        ({"beta": 0.0}, 10, 8.170728069, 0.0),
        ({}, 5000, 1e-4, 1e-4),
    ],
)
def test_the_client_s_loss_and_how_its_terms_fall(
    changes: dict[str, float], round: int, alpha: float, beta: float
) -> None:
    """10 * .98^10 = 8.170728069. Six generated samples beside a batch of 16: alpha_t counts 6/16."""
    method = replace(SMALL, **changes)
    broadcast, world = after_one_round(method)
    site = replace(world.site(1, 1, "train"), round=round)
    site.load(broadcast)
    x, y = site.data.take(torch.arange(16))
    loss = method.objective(site, broadcast, {})(site.net, x, y)
    G, rng = generator_from(method.maker(site), broadcast[GENERATOR]).eval(), world.site(1, 1, "train").rng
    logits, head = site.net(x), site.net.head
    wanted = cross_entropy(logits, y)
    if beta:
        target = softmax(head(G(torch.rand(16, 4, generator=rng), y)), 1).detach()
        wanted = wanted + beta * kl_div(log_softmax(logits, 1), target, reduction="batchmean")
    if alpha:
        y_g = torch.randint(10, (6,), generator=rng)
        wanted = wanted + alpha * 6 / 16 * cross_entropy(head(G(torch.rand(6, 4, generator=rng), y_g)), y_g)
    assert_close(loss, wanted)


def test_the_generator_is_frozen_at_a_client_and_its_features_train_the_head_alone() -> None:
    """Of the term alpha: the body gets no gradient, and batch statistics of G are not moved."""
    method = replace(SMALL, beta=0.0)
    broadcast, world = after_one_round(method)
    site = replace(world.site(1, 1, "train"), loss=lambda net, x, y: 0 * net(x).sum())
    site.load(broadcast)
    x, y = site.data.take(torch.arange(4))
    before = {name: t.clone() for name, t in broadcast[GENERATOR].items()}
    loss = method.objective(site, broadcast, {})(site.net, x, y)
    assert not any(g.any() for g in torch.autograd.grad(loss, list(site.net.body.parameters()), retain_graph=True))
    assert all(g.any() for g in torch.autograd.grad(loss, list(site.net.head.parameters())))
    assert all(torch.equal(t, before[name]) for name, t in broadcast[GENERATOR].items())


def test_the_server_teaches_with_the_heads_as_sent_and_the_labels_the_cohort_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients 0 and 2 of disjoint classes: each one's head alone teaches its labels. lr 3e-4 * .98^t, decay .01."""
    world = digits(replace(SMALL, eta=0.3), split=PCDD, hidden="12")
    start = received(world)
    updates = [work(world, c, 0, start, {}).update for c in (0, 2)]
    server = world.method.init_server(world.server_site(0, "init"))
    site = replace(world.server_site(0, "train"), round=10)
    seen: list[tuple[Site, Loss]] = []

    def noted(site: Site, loss: Loss) -> Fit:
        seen.append((site, loss))
        return Fit(0, 0.0)

    monkeypatch.setattr(fedgen, "fit", noted)
    world.method.aggregate(site, server, iter(updates))
    inner, loss = seen[0]
    held = [sorted(world.site(c, 0, "train").data.labels.unique().tolist()) for c in (0, 2)]
    assert sorted(inner.data.labels.unique().tolist()) == sorted(held[0] + held[1])
    assert inner.training == Training("adam", 3e-4 * 0.98**10, weight_decay=0.01, batch_size=6, steps=3)
    y = tensor([held[0][0], held[1][1], held[0][1]])
    state = site.rng.get_state()
    found = loss(inner.net.eval(), y[:, None], y)
    eps = torch.rand(3, 4, generator=torch.Generator().set_state(state))
    z = inner.net(eps, y)
    teachers = [updates[0], updates[1], updates[0]]
    each = []
    for row, update in zip(z, teachers, strict=True):
        own = update.payload["parameters"]
        each.append(-(own["head.weight"] @ row + own["head.bias"]).log_softmax(0)[y[len(each)]])
    assert_close(found, torch.stack(each).mean() + 0.3 * diversity(eps, z))


def test_a_round_trains_the_generator_further_from_its_last_values() -> None:
    still, moving, more = (rounds(digits(replace(SMALL, iterations=n), hidden="12"), 2)[0] for n in (0, 1, 2))
    first = [records[0].server[GENERATOR]["layers.0.weight"] for records in (still, moving, more)]
    assert torch.equal(first[0], still[1].server[GENERATOR]["layers.0.weight"])
    apart = (first[1] - first[0]).abs()
    assert 0 < float(apart.max()) <= 3.01e-4  # one step of Adam
    assert not torch.equal(first[1], first[2])


def test_the_global_model_is_the_plain_mean_and_the_first_round_fedavg_s() -> None:
    world = normed(SMALL)
    start = received(world)
    updates = [work(world, c, 0, start, {}).update for c in range(5)]
    server = world.method.aggregate(world.server_site(0, "train"), start, iter(updates))
    assert same(model_of(server), mean_of(updates))
    ours, _ = rounds(normed(SMALL), 2)
    plain, _ = rounds(normed(FedAvg()), 2)
    assert same(model_of(ours[0].server), plain[0].server)
    assert not same(model_of(ours[1].server), plain[1].server)


def test_labels_go_up_and_the_generator_down() -> None:
    """Numbers of G: (4 + 10 + 1) 8, 4 * 8 of batch norm, (8 + 1) 12; its counter has 8 bytes."""
    records, _ = rounds(digits(SMALL, hidden="12"), 2, cohorts=[[0, 1]] * 2)
    assert GENERATOR not in records[0].bytes_down
    assert records[1].bytes_down[GENERATOR] == 2 * (4 * (15 * 8 + 4 * 8 + 9 * 12) + 8)
    assert records[1].bytes_up[LABELS] == 2 * 4 * 10
    site = digits(SMALL).site(0, 0, "train")
    update = work(digits(SMALL), 0, 0, received(digits(SMALL)), {}).update
    assert torch.equal(update.payload[LABELS]["count"], site.data.labels.bincount(minlength=10).float())


def test_a_round_without_updates_leaves_the_server_as_it_was() -> None:
    records, simulation = rounds(digits(SMALL, hidden="12"), 1)
    server, world = records[0].server, simulation.world
    assert same(world.method.aggregate(world.server_site(1, "train"), server, iter([])), server)


def test_switched_off_it_sends_nothing_of_its_own() -> None:
    off = replace(SMALL, alpha=0.0, beta=0.0)
    ours, _ = rounds(digits(off, hidden="12"), 2)
    plain, _ = rounds(digits(FedAvg(), hidden="12"), 2)
    assert same(ours[-1].server, plain[-1].server)
    assert ours[-1].bytes_up == plain[-1].bytes_up


def test_a_batch_of_one_generated_sample_is_rejected() -> None:
    with pytest.raises(UsageError, match="generated"):
        settle(FedGen, {"generated": 1}, "fedgen")
