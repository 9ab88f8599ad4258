"""FedCRC: the three steps of a client, the slow global predictor, and the personal one."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedskew.core.fit import fit
from fedskew.core.losses import imitation
from fedskew.core.method import Update
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.evaluation.summary import summarise
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedbabu import FedBABU
from fedskew.methods.fedcrc import FedCRC, guided_loss
from helpers.nets import normed, received, state_of, work
from toys import digits, rounds, same, toy_q

FULL = Training(lr=0.1, batch_size=1000)  # an epoch is one step on all of a client's samples


def part(model: Payload, prefix: str) -> Payload:
    """The entries of a model under a prefix, in all groups that have one."""
    parts = {group: tensors.split(prefix)[1] for group, tensors in model.items()}
    return {group: tensors for group, tensors in parts.items() if tensors}


def head(model: Payload) -> Tensors:
    return model["parameters"].split("head.")[1]


def aggregated(tau: float, h_g: Tensor) -> Tensors:
    """h_i = (2, 0), (0, 4) and f_i = 4, 8 from 30 and 10 samples, on a server with h_g and f_g = 0."""
    server = {"parameters": Tensors({"body.w": torch.zeros(1, dtype=torch.float64), "head.w": h_g})}
    updates = [
        Update({"parameters": Tensors({"body.w": torch.tensor([f]).double(), "head.w": torch.tensor(h).double()})}, n)
        for f, h, n in ((4.0, (2.0, 0.0), 30.0), (8.0, (0.0, 4.0), 10.0))
    ]
    method = FedCRC(tau=tau)
    return method.aggregate(toy_q(method).server_site(0, "train"), server, iter(updates))["parameters"]


@pytest.mark.parametrize(
    ("tau", "h_g"), [(0.0, (1.5, 1.0)), (0.5, (1.25, 0.0)), (0.99, (1.005, -0.98)), (1.0, (1.0, -1.0))]
)
def test_fedcrc_moves_the_global_predictor_by_a_moving_average_and_the_extractor_by_the_mean(
    tau: float, h_g: tuple[float, float]
) -> None:
    """h' = .75 (2, 0) + .25 (0, 4) = (1.5, 1); h_g = tau (1, -1) + (1 - tau) h'. f_g = .75 * 4 + .25 * 8 = 5."""
    result = aggregated(tau, torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert result["head.w"].tolist() == pytest.approx(h_g, abs=1e-12)
    assert result["body.w"].tolist() == [5.0]


def test_fedcrc_moving_average_has_no_bias_correction() -> None:
    """100 rounds of one h': .99^100 = .366032 of the start remains, (1.316984, .267935)."""
    h_g = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for _ in range(100):
        h_g = aggregated(0.99, h_g)["head.w"]
    assert h_g.tolist() == pytest.approx((1.316984, 0.267935), abs=1e-6)


def test_fedcrc_global_predictor_imitates_the_local_one() -> None:
    """Global logits (1, .5, -.5), local (2, 0, -1), y 0: CE .604131, KL(local || global) .199977 (the other way
    .245891), gradient 2 p_g - y - p_i."""
    shared = torch.tensor([[1.0, 0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    own = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    loss = guided_loss(shared, own, torch.tensor([0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert shared.softmax(1)[0].tolist() == pytest.approx((0.546549, 0.331499, 0.121952), abs=1e-6)
    assert loss.item() == pytest.approx(0.804107, abs=1e-6)
    assert imitation(shared, own).item() == pytest.approx(0.199977, abs=1e-6)
    assert shared.grad is not None
    assert shared.grad[0].tolist() == pytest.approx((-0.750696, 0.548803, 0.201893), abs=1e-6)
    assert own.grad is None


def test_fedcrc_equal_predictors_leave_cross_entropy_alone() -> None:
    """KL = 0, gradient p_g - y = (.546549 - 1, .331499, .121952)."""
    shared = torch.tensor([[1.0, 0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    loss = guided_loss(shared, shared.detach().clone(), torch.tensor([0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.604131, abs=1e-6)
    assert shared.grad is not None
    assert shared.grad[0].tolist() == pytest.approx((-0.453451, 0.331499, 0.121952), abs=1e-6)


@pytest.mark.parametrize("kl", [True, False])
def test_fedcrc_steps_two_and_three_are_those_of_the_equations(kl: bool) -> None:
    """One full step each, by hand on z = f_g(x): h_i = h_g - lr (p_g - y) z, then h = h_g - lr (2 p_g - y - p_i) z,
    with p_i of the new h_i; without L_h the second is the first."""
    world = digits(FedCRC(epochs=(0, 1, 1), kl=kl), training=FULL)
    site = world.site(0, 0, "train")
    site.load()
    z, y = site.infer(site.net.body).double(), one_hot(site.data.labels, 10)
    w, b = (t.double() for t in head(world.initial).values())
    p_g = (z @ w.T + b).softmax(1)
    own = w - 0.1 * (p_g - y).T @ z / len(z), b - 0.1 * (p_g - y).mean(0)
    slope = 2 * p_g - y - (z @ own[0].T + own[1]).softmax(1) if kl else p_g - y
    shared = w - 0.1 * slope.T @ z / len(z), b - 0.1 * slope.mean(0)

    done = work(world, 0, 0, received(world), {})
    for got, wanted in ((head(done.state), own), (head(done.update.payload), shared)):
        for t, by_hand in zip(got.values(), wanted, strict=True):
            assert torch.allclose(t.double(), by_hand, atol=1e-6)


@pytest.mark.parametrize("augment", ["", "flip"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_fedcrc_each_step_moves_its_own_part_and_leaves_the_rest_bit_for_bit(step: int, augment: str) -> None:
    """The extractor with its batch-norm statistics, the local predictor, the global predictor."""
    epochs = int(step == 1), int(step == 2), int(step == 3)
    world = normed(FedCRC(epochs=epochs), training=Training(lr=0.1, momentum=0.9, batch_size=16, augment=augment))
    done = work(world, 0, 0, received(world), {})
    sent, kept = done.update.payload, done.state
    assert same(part(sent, "body."), part(world.initial, "body.")) == (step != 1)
    assert same(part(kept, "head."), part(world.initial, "head.")) == (step != 2)
    assert same(part(sent, "head."), part(world.initial, "head.")) == (step != 3)
    assert "body.2.running_mean" in part(sent, "body.")["buffers"]
    assert set(kept) == {"parameters"}
    assert set(kept["parameters"]) == {"head.weight", "head.bias"}


def test_fedcrc_with_a_fixed_predictor_is_the_body_training_of_fedbabu_bit_for_bit() -> None:
    training = Training(lr=0.1, momentum=0.9, batch_size=16, epochs=2)
    cohorts = [[0, 1], [2, 3, 4], [0, 4]]
    crc = normed(FedCRC(tau=1.0, epochs=(2, 1, 0)), training=training)
    babu = normed(FedBABU(weighting="samples"), training=training)
    by_crc, by_babu = (rounds(world, 3, cohorts)[0][-1].server for world in (crc, babu))
    assert same(part(by_crc, "body."), by_babu)
    assert same(part(by_crc, "head."), part(crc.initial, "head."))


def test_fedcrc_tau_one_freezes_the_predictor_though_clients_move_theirs() -> None:
    world = digits(FedCRC(tau=1.0))
    records, _ = rounds(world, 2)
    assert same(part(records[-1].server, "head."), part(world.initial, "head."))


def test_fedcrc_without_its_moving_average_takes_over_a_single_upload_bit_for_bit() -> None:
    world = normed(FedCRC(tau=0.0))
    records, _ = rounds(world, 1, cohorts=[[3]])
    assert same(records[0].server, work(world, 3, 0, received(world), {}).update.payload)


def test_fedcrc_without_its_moving_average_is_the_plain_mean_bit_for_bit() -> None:
    world = digits(FedCRC(tau=0.0))
    records, _ = rounds(world, 1)
    updates = [work(world, c, 0, received(world), {}).update for c in range(world.population)]
    assert same(records[0].server, FedAvg().aggregate(world.server_site(0, "train"), received(world), iter(updates)))


def test_fedcrc_personal_predictors_last_and_belong_to_their_clients() -> None:
    """Cohorts {0}, {1}, {0}: client 1's stays through round 2, client 0's goes on from its own of round 0, and
    client 2, which never took part, has the global one."""
    world = digits(FedCRC(tau=0.5, eval_refresh=False))
    cohorts = [[0], [1], [0]]
    records, early = rounds(world, 2, cohorts)
    _, late = rounds(world, 3, cohorts)
    zero, one = state_of(early, 0), state_of(early, 1)
    assert same(zero, work(world, 0, 0, received(world), {}).state)
    assert same(one, state_of(late, 1))
    again = work(world, 0, 2, records[-1].server, zero).state
    assert same(again, state_of(late, 0))
    assert not same(again, work(world, 0, 2, records[-1].server, {}).state)
    assert not same(again, work(world, 0, 2, records[-1].server, one).state)

    server = records[-1].server
    for client, h in ((0, zero), (1, one), (2, server)):
        model = world.method.personalise(world.site(client, 2, "evaluate"), server, state_of(early, client))
        assert same(part(model, "head."), part(h, "head."))
        assert same(part(model, "body."), part(server, "body."))


def test_fedcrc_first_step_is_under_the_received_predictor_not_the_clients_own() -> None:
    world = digits(FedCRC())
    strange = {"parameters": head(world.initial) * 3.0}
    with_own, without = (work(world, 0, 0, received(world), state).update.payload for state in (strange, {}))
    assert same(part(with_own, "body."), part(without, "body."))


def test_fedcrc_evaluates_both_models_and_sends_as_much_as_fedavg() -> None:
    world = digits(FedCRC(tau=0.5))
    records, simulation = rounds(world, 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert records[-1].bytes_up == plain[-1].bytes_up
    assert records[-1].bytes_down == plain[-1].bytes_down
    metrics = simulation.evaluate(1, records[-1].server)
    assert metrics.global_.accuracy > 0
    assert metrics.clients.global_.mean != metrics.clients.personal.mean


@pytest.mark.parametrize("trained", [True, False])
def test_fedcrc_may_refresh_the_personal_predictor_on_the_received_extractor(trained: bool) -> None:
    """A full step of Eq. 5 from h_i (from h_g without one): h_i - lr (p_i - y) z with z = f_g(x)."""
    world = normed(FedCRC(eval_refresh=True, epochs=(1, 1, 1)), training=FULL)
    state: Payload = {"parameters": head(world.initial) * 2.0} if trained else {}
    site = world.site(0, 0, "evaluate")
    site.load()
    z, y = site.infer(site.net.body).double(), one_hot(site.data.labels, 10)
    w, b = (t.double() for t in head(state or world.initial).values())
    slope = (z @ w.T + b).softmax(1) - y
    model = world.method.personalise(site, received(world), state)
    assert same(part(model, "body."), part(world.initial, "body."))
    assert torch.allclose(head(model)["head.weight"].double(), w - 0.1 * slope.T @ z / len(z), atol=1e-6)
    assert torch.allclose(head(model)["head.bias"].double(), b - 0.1 * slope.mean(0), atol=1e-6)


@pytest.mark.parametrize(("fast", "batch_norm"), [(True, "aggregate"), (False, "aggregate"), (True, "local")])
def test_fedcrc_on_features_is_fedcrc_on_images(fast: bool, batch_norm: Literal["aggregate", "local"]) -> None:
    """An augmentation that changes nothing takes the way over the images; full batches, so order does not count."""
    method, results = FedCRC(epochs=(2, 3, 3), eval_refresh=True), []
    for augment in ("", "flip:p=0"):
        world = normed(method, training=replace(FULL, augment=augment, batch_norm=batch_norm), fast=fast)
        first = work(world, 0, 0, received(world), {})
        second = work(world, 0, 1, first.update.payload, first.state)
        own = method.personalise(world.site(0, 1, "evaluate"), second.update.payload, second.state)
        results.append({"sent": head(second.update.payload), "kept": head(second.state), "own": head(own)})
    for group, tensors in results[0].items():
        for name, t in tensors.items():
            assert torch.allclose(t, results[1][group][name], atol=1e-5), (group, name)


def test_fedcrc_work_on_features_leaves_the_net_as_it_is() -> None:
    """Also the flat buffer behind it: a later step on the net's own head still moves it."""
    site = digits(FedCRC()).site(0, 0, "train")
    site.load()
    fit(site, site.loss, train="body.")
    before, heads = site.model(), site.head_only()
    fit(heads, site.loss, train="head.")
    assert same(site.model(), before)
    fit(site, site.loss, train="head.")
    assert not same(part(site.model(), "head."), part(before, "head."))
    assert same(part(site.model(), "body."), part(before, "body."))


def test_fedcrc_computes_features_once_for_the_predictors() -> None:
    world = digits(FedCRC(epochs=(0, 3, 3)))
    passes: list[int] = []
    world.net.body.register_forward_hook(lambda module, x, z: passes.append(len(z)))
    work(world, 0, 0, received(world), {})
    assert passes == [len(world.train[0])]


def test_fedcrc_fast_and_plain_steps_agree() -> None:
    training = Training(lr=0.05, momentum=0.9, weight_decay=1e-3, batch_size=16)
    fast, plain = (rounds(normed(FedCRC(tau=0.5), training=training, fast=f), 3)[0][-1].server for f in (True, False))
    for name, t in fast["parameters"].items():
        assert torch.allclose(t, plain["parameters"][name], atol=1e-4), name


@pytest.mark.parametrize("augment", ["", "flip"])
def test_fedcrc_local_batch_norm_statistics_stay_with_the_client(augment: str) -> None:
    """The state is h_i and the extractor's statistics, which go on from where they were; none is sent."""
    world = normed(FedCRC(), training=Training(lr=0.1, batch_size=16, batch_norm="local", augment=augment))
    first = work(world, 0, 0, received(world), {})
    assert set(first.update.payload) == {"parameters"}
    assert set(first.state) == {"parameters", "buffers"}
    second = work(world, 0, 1, first.update.payload, first.state)
    steps = -(-len(world.train[0]) // 16)
    assert [int(s.state["buffers"]["body.2.num_batches_tracked"]) for s in (first, second)] == [steps, 2 * steps]


def test_fedcrc_refresh_of_a_client_without_training_data_is_the_received_model() -> None:
    world = digits(FedCRC(eval_refresh=True))
    site = world.site(0, 0, "evaluate")
    site.data = site.data.part(torch.empty(0, dtype=torch.int64))
    assert same(world.method.personalise(site, received(world), {}), world.initial)


@pytest.mark.parametrize(("round", "lr"), [(0, 0.05), (49, 0.05), (50, 0.01), (74, 0.01), (75, 0.001), (99, 0.001)])
def test_fedcrc_learning_rate_steps_at_the_50th_and_75th_round(round: int, lr: float) -> None:
    assert Training(lr=0.05, schedule="steps:50=0.01,75=0.001").at(round, 100).lr == lr


def test_fedcrc_mean_accuracy_of_clients_is_unweighted_and_the_weighted_one_beside_it() -> None:
    """.9 on 10 samples and .5 on 90: (.9 + .5) / 2 = .7; (9 + 45) / 100 = .54."""
    scores = [Score((9,), (10,), 0.0), Score((45,), (90,), 0.0)]
    clients = [ClientScore(i, None, score, fallback=False) for i, score in enumerate(scores)]
    figures = summarise(None, clients, frozenset(), False, {}).clients.personal
    assert (figures.mean, figures.weighted) == pytest.approx((0.7, 0.54), abs=1e-12)
