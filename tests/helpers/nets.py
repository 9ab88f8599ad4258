"""Small nets on the digits, and single steps of a round, for tests of methods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedskew.core.method import Method
from fedskew.core.net import Net
from fedskew.core.tensors import Payload
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.federation.world import ClientRound, World
from toys import digits


def small_net(seed: int = 0) -> Net:
    """8x8 digits, 16 features behind a batch norm with running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        return Net(body, nn.Linear(16, 10), 16)


def normed(method: Method, **options: Any) -> World:
    """The digits' world with `small_net`."""
    return replace(digits(method, **options), make_net=partial(small_net))


def two_layers(bias: bool) -> Net:
    """A net whose head has two layers, the last with or without a bias."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10, bias=bias))
        return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), head, 16)


def received(world: World) -> Payload:
    """What clients receive in the first round."""
    return world.method.broadcast(world.method.init_server(world.server_site(0, "init")))


def work(world: World, client: int, round: int, broadcast: Payload, state: Payload) -> ClientRound:
    """One client's round, as the loop would run it."""
    return world.train_client(client, round, "train", broadcast, state)


def state_of(simulation: Simulation, client: int) -> Payload:
    """What a client has kept; {} if nothing."""
    blob = simulation.store.get(client)
    return decode(blob) if blob else {}


def linear_features(depth: int, d: int) -> nn.Module:
    """A net whose features follow no ReLU and start small, as those of simple-cnn's projection."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(32, 32), nn.ReLU()]
        net = nn.Sequential()
        net.add_module("body", nn.Sequential(*layers, nn.Linear(32, d)))
        net.add_module("head", nn.Linear(d, 10))
    return net
