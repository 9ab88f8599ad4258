"""IFCA: which model a client chooses, and that the server keeps models apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.core.method import Update
from fedskew.core.tensors import Tensors
from fedskew.methods.ifca import IFCA, model_number
from helpers.nets import normed, received, work
from toys import digits, rounds, toy_q


def update(value: float, weight: float, j: int) -> Update:
    choice = torch.zeros(2)
    choice[j] = 1
    return Update({"parameters": Tensors(w=torch.tensor(value)), "choice": Tensors(model=choice)}, weight)


def test_the_server_averages_each_model_over_those_who_chose_it() -> None:
    """Model 0: (1 * 1 + 4 * 3) / 4 = 3.25; model 1: 7."""
    world = toy_q(IFCA())
    server = {"parameters": Tensors(w=torch.tensor(0.0)), "parameters_1": Tensors(w=torch.tensor(5.0))}
    sent = [update(1.0, 1.0, 0), update(7.0, 2.0, 1), update(4.0, 3.0, 0)]
    fresh = world.method.aggregate(world.server_site(0, "train"), server, iter(sent))
    assert [float(fresh[g]["w"]) for g in ("parameters", "parameters_1")] == [3.25, 7.0]
    alone = world.method.aggregate(world.server_site(0, "train"), server, iter(sent[1:2]))
    assert [float(alone[g]["w"]) for g in ("parameters", "parameters_1")] == [0.0, 7.0]  # nobody chose model 0


def test_models_start_different_and_follow_from_the_seed() -> None:
    a, b = (received(digits(IFCA(clusters=3))) for _ in range(2))
    weights = [model_number(a, j)["parameters"]["head.weight"] for j in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert torch.equal(weights[2], model_number(b, 2)["parameters"]["head.weight"])
    other = received(digits(IFCA(clusters=3), seed=1))
    assert not torch.equal(weights[2], model_number(other, 2)["parameters"]["head.weight"])


def test_a_client_trains_the_model_with_the_smallest_loss_on_its_samples() -> None:
    world = digits(IFCA())
    broadcast = received(world)
    site = world.site(0, 0, "train")
    common = int(site.data.labels.mode().values)
    for j in (0, 1):  # a bias towards the client's commonest class makes model j the better one
        group = "parameters" if j == 0 else "parameters_1"
        bias = broadcast[group]["head.bias"].clone()
        bias[common] += 2.0
        better = broadcast | {group: broadcast[group] | Tensors({"head.bias": bias})}
        done = work(world, 0, 0, better, {})
        assert done.update.payload["choice"]["model"].argmax() == j
        personal = world.method.personalise(world.site(0, 0, "evaluate"), better, {})["parameters"]
        assert torch.equal(personal["head.bias"], bias)


def test_two_groups_with_opposite_labels_are_told_apart() -> None:
    """Clients 0-2 keep their labels, clients 3-5 have them moved by one: no single model fits both."""
    world = digits(IFCA(), split="iid:clients=6", count=15)
    for client in (3, 4, 5):
        own = torch.cat([part[client] for part in (world.train, world.test)])
        world.y[own] = (world.y[own] + 1) % 10
    records, simulation = rounds(world, 15)
    broadcast = world.method.broadcast(records[-1].server)
    chosen = [world.method.choose(world.site(c, 0, "evaluate"), broadcast) for c in range(6)]
    assert chosen[0] == chosen[1] == chosen[2] != chosen[3] == chosen[4] == chosen[5]
    scores = simulation.evaluate(14, broadcast)
    assert scores.clients.personal.mean > 0.7


def test_batch_norm_statistics_belong_to_their_model() -> None:
    records, _ = rounds(normed(IFCA()), 1)
    assert {"buffers", "buffers_1"} <= records[0].server.keys()


@pytest.mark.parametrize("clusters", [2, 4])
def test_every_client_receives_all_models_and_sends_one(clusters: int) -> None:
    world = digits(IFCA(clusters=clusters))
    records, _ = rounds(world, 1, cohorts=[[0]])
    down, up = records[0].bytes_down, records[0].bytes_up
    assert sum(size for group, size in down.items() if group.startswith("parameters")) == clusters * up["parameters"]
    assert up["choice"] == 4 * clusters
    assert np.isfinite(records[0].training["loss"])
