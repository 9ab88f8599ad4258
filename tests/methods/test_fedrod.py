"""FedRoD: balanced softmax for the generic model, and a second head for each client."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.core.settings import UsageError
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedrod import FedRoD, log_counts
from helpers.nets import received, state_of, two_layers, work
from toys import digits, rounds, same


def test_balanced_softmax_adds_the_log_of_the_counts() -> None:
    """3 and 1 samples, logits 0: softmax of (log 3, log 1) is (3/4, 1/4), so the loss of class 1 is log 4."""
    method = FedRoD()
    site = digits(method).site(0, 0, "train")
    site.data, site.classes = type(site.data)(torch.zeros(4, 1), tensor([0, 0, 0, 1]), torch.arange(4)), 2
    loss = method.objective(site, {}, {})(lambda x: torch.zeros(1, 2), torch.zeros(1, 1), tensor([1]))
    assert_close(loss, tensor(4.0).log())
    assert_close(log_counts(tensor([0, 0, 2]), 3), tensor([2.0, 0.0, 1.0]).log())


def test_the_personal_model_is_the_sum_of_both_heads() -> None:
    world = digits(FedRoD())
    records, simulation = rounds(world, 1)
    state, broadcast = state_of(simulation, 0), world.method.broadcast(records[-1].server)
    assert state.keys() == {"own_head"}
    assert state["own_head"]["head.weight"].abs().sum() > 0
    personal = world.method.personalise(world.site(0, 1, "evaluate"), broadcast, state)["parameters"]
    for name, t in personal.items():
        extra = state["own_head"].get(name, torch.zeros(()))
        assert_close(t, broadcast["parameters"][name] + extra)


def test_a_client_that_has_not_trained_has_the_generic_model() -> None:
    world = digits(FedRoD())
    broadcast = received(world)
    personal = world.method.personalise(world.site(0, 0, "evaluate"), broadcast, {})
    assert same({"parameters": personal["parameters"]}, {"parameters": broadcast["parameters"]})


def test_the_own_head_lowers_the_loss_of_the_sum_and_does_not_touch_what_is_sent() -> None:
    """The generic part is trained first: what is sent does not depend on head_epochs."""
    world = digits(FedRoD(head_epochs=0))
    still = work(world, 0, 0, received(world), {})
    moved = work(replace(world, method=FedRoD(head_epochs=8)), 0, 0, received(world), {})
    assert same(still.update.payload, moved.update.payload)
    assert (still.state["own_head"]["head.weight"] == 0).all()
    site = world.site(0, 0, "train")
    x, y = site.data.take(torch.arange(len(site.data)))
    losses = []
    for done in (still, moved):
        site.load(world.method.personalise(site, done.update.payload, done.state))
        losses.append(site.loss(site.net, x, y).item())
    assert losses[1] < losses[0]


def test_the_own_head_continues_from_its_last_value() -> None:
    world = digits(FedRoD(head_epochs=0))
    state = {"own_head": work(replace(world, method=FedRoD()), 0, 0, received(world), {}).state["own_head"]}
    again = work(world, 0, 1, received(world), state)
    assert same({"h": again.state["own_head"]}, {"h": state["own_head"]})


def test_without_balance_the_global_model_is_fedavgs() -> None:
    ours, _ = rounds(digits(FedRoD(balanced=False)), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert same(ours[-1].server, plain[-1].server)


def test_a_head_of_two_layers_is_refused_in_a_sentence() -> None:
    world = replace(digits(FedRoD()), make_net=partial(two_layers, True))
    with pytest.raises(UsageError, match="one linear layer"):
        work(world, 0, 0, received(world), {})
