"""tau-norm: the rule on numbers; what is trained is FedAvg's, what is deployed is normalised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.core.method import model_of
from fedskew.core.samples import Data
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.evaluation.scores import score
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods._shared.heads import as_trained
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.taunorm import TauNorm, tau_normalise
from helpers.nets import normed, received, two_layers
from toys import digits, rounds, same

W = tensor([[3.0, 4.0], [0.0, 1.0]]).double()


def test_the_rule_on_numbers() -> None:
    """|(3, 4)| = 5. tau .5: (3, 4) / sqrt 5. The feature (.1, .95): logits (4.1, .95) become (.82, .95)."""
    assert_close(tau_normalise(W, 1.0), tensor([[0.6, 0.8], [0.0, 1.0]]).double())
    assert_close(tau_normalise(W, 0.5), tensor([[1.341640786, 1.788854382], [0.0, 1.0]]).double())
    assert torch.equal(tau_normalise(W, 0.0), W)
    feature = tensor([0.1, 0.95]).double()
    assert_close(W @ feature, tensor([4.1, 0.95]).double())
    assert_close(tau_normalise(W, 1.0) @ feature, tensor([0.82, 0.95]).double())
    assert (W @ feature).argmax() == 0
    assert (tau_normalise(W, 1.0) @ feature).argmax() == 1


def test_a_row_of_zeros_stays_zero() -> None:
    assert_close(tau_normalise(tensor([[0.0, 0.0], [3.0, 4.0]]), 1.0), tensor([[0.0, 0.0], [0.6, 0.8]]))


COHORTS = [[0, 1], [1, 2, 3], [0, 4]]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_training_is_fedavg_s_bit_for_bit_whatever_is_deployed(tau: float, schedule: str) -> None:
    training = Training(lr=0.1, batch_size=16, momentum=0.9, schedule=schedule)
    ours, _ = rounds(normed(TauNorm(tau=tau), training=training), 3, cohorts=COHORTS)
    plain, _ = rounds(normed(FedAvg(), training=training), 3, cohorts=COHORTS)
    for a, b in zip(ours, plain, strict=True):
        assert same(model_of(as_trained(a.server)), b.server)
        assert a.training == b.training
        assert a.bytes_up == b.bytes_up


def deployed(plain: Payload, tau: float, *, drop_bias: bool) -> Payload:
    """FedAvg's model with its classifier normalised by hand."""
    w, b = (plain["parameters"][f"head.{name}"] for name in ("weight", "bias"))
    rows = torch.stack([row / row.norm() ** tau for row in w])
    head = {"head.weight": rows, "head.bias": torch.zeros_like(b) if drop_bias else b}
    return plain | {"parameters": plain["parameters"] | head}


@pytest.mark.parametrize("drop_bias", [True, False])
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_the_server_s_model_is_fedavg_s_with_its_classifier_normalised(tau: float, drop_bias: bool) -> None:
    method = TauNorm(tau=tau, drop_bias=drop_bias)
    ours, _ = rounds(normed(method), 2)
    plain, _ = rounds(normed(FedAvg()), 2)
    for a, b in zip(ours, plain, strict=True):
        assert (b.server["parameters"]["head.bias"] != 0).all()
        model = model_of(method.broadcast(a.server))
        wanted = deployed(b.server, tau, drop_bias=drop_bias)
        for group in ("parameters", "buffers"):
            assert_close(dict(model[group]), dict(wanted[group]))


def test_what_is_tested_is_the_normalised_model() -> None:
    """On the balanced set, and on each client's own part: both as the deployed model scores by itself."""
    world = digits(TauNorm(), count=2)
    simulation = Simulation(world)
    *_, record = run(world.method, simulation, world.server_site, 2, lambda round: [0, 1, 2])
    plain, _ = rounds(digits(FedAvg(), count=2), 2, cohorts=[[0, 1, 2]] * 2)
    net = world.make_net()
    net.load_state_dict(deployed(plain[-1].server, 1.0, drop_bias=True)["parameters"])
    data = Data(world.x_test, world.y_test, torch.arange(len(world.y_test)), world.mean, world.std)
    assert record.metrics is not None
    wanted = score(net, data, 10)
    assert record.metrics.global_.accuracy == wanted.accuracy
    assert record.metrics.global_.loss == pytest.approx(wanted.loss / len(data), rel=1e-5)
    own = score(net, world.pool(world.test[1], 1), 10)
    _, shared, personal = simulation.summary.clients.scores()[1]
    assert personal.correct == own.correct
    assert shared == personal


def test_the_trained_classifier_is_all_that_travels_extra_and_only_down() -> None:
    """mlp: (200 + 1) * 10 numbers of 4 bytes to each of 5 clients; no round is added."""
    ours, _ = rounds(digits(TauNorm()), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    for a, b in zip(ours, plain, strict=True):
        assert a.bytes_up == b.bytes_up
        assert a.bytes_down == b.bytes_down | {"trained": 5 * 4 * 10 * 201}


def test_the_initial_model_is_normalised_too() -> None:
    server = received(digits(TauNorm()))
    assert_close(server["parameters"]["head.weight"].norm(dim=1), torch.ones(10))


def test_a_round_without_updates_leaves_both_classifiers_as_they_were() -> None:
    """Were the normalised classifier taken for the trained one, it would be fed back into training."""
    records, simulation = rounds(digits(TauNorm(tau=0.5)), 1)
    world, server = simulation.world, records[0].server
    assert same(world.method.aggregate(world.server_site(1, "train"), server, iter([])), server)


@pytest.mark.parametrize("bias", [True, False])
def test_of_a_head_of_two_layers_the_last_is_the_classifier(bias: bool) -> None:
    ours, _ = rounds(replace(digits(TauNorm()), make_net=partial(two_layers, bias)), 1)
    plain, _ = rounds(replace(digits(FedAvg()), make_net=partial(two_layers, bias)), 1)
    a, b = ours[0].server["parameters"], plain[0].server["parameters"]
    assert {name for name in a if not torch.equal(a[name], b[name])} == {"head.2.weight", "head.2.bias"} & a.keys()
    assert_close(a["head.2.weight"].norm(dim=1), torch.ones(10))


def test_dropping_the_bias_alone_is_not_fedavg() -> None:
    ours, _ = rounds(digits(TauNorm(tau=0.0)), 1)
    plain, _ = rounds(digits(FedAvg()), 1)
    a, b = ours[0].server["parameters"], plain[0].server["parameters"]
    assert {name for name in a if not torch.equal(a[name], b[name])} == {"head.bias"}


def test_with_tau_0_and_the_bias_kept_it_is_fedavg_bit_for_bit() -> None:
    ours, _ = rounds(digits(TauNorm(tau=0.0, drop_bias=False)), 3, cohorts=COHORTS)
    plain, _ = rounds(digits(FedAvg()), 3, cohorts=COHORTS)
    assert same(ours[-1].server, plain[-1].server)
    assert ours[-1].bytes_down == plain[-1].bytes_down
