"""FedProto: the distance on numbers, the pooling, and that nothing but prototypes travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fedskew.core.method import Update
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods._shared.prototypes import GROUP, class_means
from fedskew.methods.fedproto import FedProto, to_prototype
from fedskew.methods.local import Local
from helpers.nets import normed, received, state_of, work
from toys import digits, rounds, same

Z, Y = tensor([[1.0, 2.0], [3.0, 4.0]]).double(), tensor([0, 1])
ORIGIN, KNOWN = torch.zeros(2, 2).double(), tensor([True, True])
DISTANCES = ["mse", "l2"]
PCDD = "pcdd:clients=5,classes=2"


def test_the_distance_on_numbers() -> None:
    """To the origin: (1 + 4 + 9 + 16) / 4 = 7.5, half the mean squared length 15; (sqrt 5 + 5) / 2 = 3.618034."""
    assert to_prototype(Z, Y, ORIGIN, KNOWN, "mse").item() == pytest.approx(7.5, abs=1e-12)
    assert 2 * to_prototype(Z, Y, ORIGIN, KNOWN, "mse").item() == pytest.approx(15.0, abs=1e-12)
    assert to_prototype(Z, Y, ORIGIN, KNOWN, "l2").item() == pytest.approx(3.618033989, abs=1e-9)


def test_each_sample_is_drawn_to_the_prototype_of_its_own_class() -> None:
    """P_0 = (1, 2), P_1 = (3, 0): the first is on its prototype; the second is 4 away, 16 / 4 in the mean square."""
    prototypes = tensor([[1.0, 2.0], [3.0, 0.0]]).double()
    assert to_prototype(Z, Y, prototypes, KNOWN, "mse").item() == 4.0
    assert to_prototype(Z, Y, prototypes, KNOWN, "l2").item() == 2.0


@pytest.mark.parametrize(("distance", "value"), [("mse", 5 / 4), ("l2", 5**0.5 / 2)])
def test_a_sample_without_prototype_adds_nothing_and_counts_in_the_mean(distance: Any, value: float) -> None:
    z = Z.clone().requires_grad_()
    loss = to_prototype(z, Y, ORIGIN, tensor([True, False]), distance)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(value, abs=1e-12)
    assert z.grad is not None
    assert z.grad[0].all()
    assert not z.grad[1].any()


@pytest.mark.parametrize(("weighting", "pooled"), [("uniform", (0.5, 1.0)), ("samples", (0.25, 1.5))])
def test_pooling_on_numbers(weighting: Any, pooled: tuple[float, float]) -> None:
    """(1, 0) of 1 sample and (0, 2) of 3; a client without the class does not count."""
    sent = [((1.0, 0.0), 1.0), ((9.0, 9.0), 0.0), ((0.0, 2.0), 3.0)]
    updates = [Update({GROUP: Tensors(mean=tensor([m]), count=tensor([n]))}, 10.0) for m, n in sent]
    method = FedProto(weighting=weighting)
    server = {GROUP: Tensors(mean=torch.zeros(1, 2), count=torch.zeros(1))}
    fresh = method.aggregate(digits(method).server_site(0, "train"), server, iter(updates))
    assert fresh.keys() == {GROUP}
    assert fresh[GROUP]["mean"][0].tolist() == pytest.approx(pooled, abs=1e-7)


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_objective_adds_lambda_times_the_distance(distance: Any) -> None:
    method = FedProto(lam=0.7, distance=distance)
    world = digits(method, split=PCDD)
    records, simulation = rounds(world, 1, cohorts=[[0, 1]])
    prototypes = records[0].server[GROUP]
    known = prototypes["count"] > 0
    assert 0 < known.sum() < 10
    site = world.site(0, 1, "train")
    site.load()
    x, y = site.data.take(torch.arange(16))
    z = site.net.body(x)
    wanted = cross_entropy(site.net.head(z), y) + 0.7 * to_prototype(z, y, prototypes["mean"], known, distance)
    assert_close(method.objective(site, records[0].server, state_of(simulation, 0))(site.net, x, y), wanted)


def test_prototypes_are_all_that_travels_and_the_client_keeps_its_whole_model() -> None:
    """10 classes, 16 features and a count each, 5 clients, 4 bytes; no empty group either."""
    world = normed(FedProto())
    records, simulation = rounds(world, 2)
    for record in records:
        assert record.bytes_up == record.bytes_down == {GROUP: 5 * 4 * 10 * (16 + 1)}
        assert record.server.keys() == {GROUP}
    state = state_of(simulation, 3)
    assert {group: tensors.keys() for group, tensors in state.items()} == {
        group: tensors.keys() for group, tensors in world.initial.items()
    }
    assert (state["buffers"]["body.2.running_mean"] != 0).all()


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_own_prototypes_are_those_of_the_trained_model_over_all_its_samples(policy: Any) -> None:
    world = normed(FedProto(), training=Training(lr=0.1, batch_size=16, batch_norm=policy))
    done = work(world, 2, 0, received(world), {})
    site = world.site(2, 0, "train")
    z = site.infer(site.frozen(done.state).body)
    assert_close(done.update.payload[GROUP], class_means(z, site.data.labels, 10))


def test_the_first_round_is_training_alone_and_the_second_is_not() -> None:
    def states(count: int, method: Any) -> list[Any]:
        _, simulation = rounds(digits(method), count)
        return [state_of(simulation, c) for c in range(5)]

    assert all(same(a, b) for a, b in zip(states(1, FedProto()), states(1, Local()), strict=True))
    assert not any(same(a, b) for a, b in zip(states(2, FedProto()), states(2, Local()), strict=True))


def test_with_lambda_0_every_client_trains_alone_bit_for_bit() -> None:
    cohorts = [[0, 1], [1, 2], [0, 2]]
    (_, ours), (_, alone) = (rounds(digits(m), 3, cohorts=cohorts) for m in (FedProto(lam=0.0), Local()))
    assert all(same(state_of(ours, c), state_of(alone, c)) for c in range(3))


def test_a_term_that_is_0_is_left_out() -> None:
    """lambda 0, or no prototype of any class yet: the task's loss itself, at no cost."""
    world = digits(FedProto())
    site, start = world.site(0, 1, "train"), received(world)
    known = {GROUP: start[GROUP] | {"count": torch.ones(10)}}
    assert FedProto().objective(site, start, {}) is site.loss
    assert FedProto(lam=0.0).objective(site, known, {}) is site.loss
    assert FedProto().objective(site, known, {}) is not site.loss


def test_a_class_the_cohort_does_not_hold_keeps_its_prototype() -> None:
    records, simulation = rounds(digits(FedProto(), split=PCDD), 2, cohorts=[[0], [1]])
    first, second = (r.server[GROUP] for r in records)
    held = [torch.bincount(simulation.world.site(c, 0, "train").data.labels, minlength=10) > 0 for c in (0, 1)]
    assert torch.equal(second["mean"][held[0]], first["mean"][held[0]])
    assert torch.equal(second["count"] > 0, held[0] | held[1])


def test_each_client_is_evaluated_with_its_own_model_and_there_is_no_global_one() -> None:
    world = digits(FedProto(), count=2)
    simulation = Simulation(world)
    record = list(run(world.method, simulation, world.server_site, 2, lambda round: [0, 1, 2]))[-1]
    assert record.metrics is not None
    assert record.metrics.global_ is None
    assert record.metrics.clients.global_ is None
    assert record.metrics.clients.never_trained == 2
    state = state_of(simulation, 0)
    deployed = world.method.personalise(world.site(0, 1, "evaluate"), record.server, state)
    assert same(deployed, {"parameters": state["parameters"], "buffers": world.initial["buffers"]})
    stranger = world.method.personalise(world.site(4, 1, "evaluate"), record.server, {})
    assert same(stranger, world.initial)


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_larger_lambda_brings_features_nearer_to_the_prototypes(distance: Any) -> None:
    records, simulation = rounds(digits(FedProto()), 1)
    P, known = records[0].server[GROUP]["mean"], records[0].server[GROUP]["count"] > 0

    def gap(lam: float) -> float:
        world = digits(FedProto(lam=lam, distance=distance), training=Training(lr=0.01, batch_size=16))
        state = work(world, 1, 1, records[0].server, state_of(simulation, 1)).state
        site = world.site(1, 1, "train")
        return to_prototype(site.infer(site.frozen(state).body), site.data.labels, P, known, distance).item()

    assert gap(2.0) < gap(0.2) < gap(0.0)
