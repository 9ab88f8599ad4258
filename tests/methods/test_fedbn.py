"""FedBN: what a client keeps of its batch norm, and what the others get."""

from __future__ import annotations

import torch

from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedbn import FedBN, norm_layers
from helpers.nets import normed, received, small_net, state_of, work
from toys import digits, rounds, same

NORM = "body.2."


def test_norm_layers_are_named_by_their_prefixes() -> None:
    assert norm_layers(small_net()) == (NORM,)


def test_a_client_keeps_weight_bias_and_statistics_of_its_batch_norm_only() -> None:
    _, simulation = rounds(normed(FedBN()), 1)
    state = state_of(simulation, 0)
    assert set(state["parameters"]) == {f"{NORM}weight", f"{NORM}bias"}
    assert set(state["buffers"]) == {f"{NORM}running_mean", f"{NORM}running_var", f"{NORM}num_batches_tracked"}


def test_the_first_round_is_fedavgs_and_the_second_starts_from_the_own_batch_norm() -> None:
    ours, simulation = rounds(normed(FedBN()), 1)
    plain, _ = rounds(normed(FedAvg()), 1)
    assert same(ours[0].server, plain[0].server)
    world = normed(FedBN())
    state = state_of(simulation, 0)
    personal = world.method.personalise(world.site(0, 1, "evaluate"), world.method.broadcast(ours[0].server), state)
    for group in ("parameters", "buffers"):
        for name, t in personal[group].items():
            own = name.startswith(NORM)
            assert torch.equal(t, state[group][name] if own else ours[0].server[group][name]), name


def test_training_starts_from_the_own_batch_norm() -> None:
    """With 0 epochs a client sends what it starts from: the received model, its own batch norm."""
    world = normed(FedBN())
    _, simulation = rounds(world, 1)
    state = state_of(simulation, 0)
    world.training = type(world.training)(lr=0.1, epochs=0)
    sent = work(world, 0, 1, received(world), state).update.payload["parameters"]
    assert torch.equal(sent[f"{NORM}weight"], state["parameters"][f"{NORM}weight"])
    assert torch.equal(sent["head.weight"], world.initial["parameters"]["head.weight"])


def test_a_net_without_batch_norm_gives_fedavg() -> None:
    ours, simulation = rounds(digits(FedBN()), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert same(ours[-1].server, plain[-1].server)
    assert state_of(simulation, 0) == {}
