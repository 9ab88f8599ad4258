"""What a method costs beyond FedAvg, from the shapes of what it sends and keeps. Two rounds on made-up samples tell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fedskew.core.method import Method
from fedskew.core.net import Shape
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.wire import size_of
from fedskew.federation.world import World, world_from_tensors
from fedskew.models import build

Sizes = dict[str, int]  # bytes by group of a payload


@dataclass(frozen=True)
class Ledger:
    """Bytes by group: a client's share of a round, and what stays where."""

    down: Sizes
    up: Sizes
    client: Sizes  # what a client keeps between rounds
    server: Sizes
    once: dict[str, tuple[Sizes, Sizes]]  # rounds of another kind, by name: (down, up)


def made_up(method: Method, model: str, shape: Shape, classes: int) -> World:
    """Two clients and a public set, two samples of each class everywhere, one step a round."""
    n = 2 * classes
    pictures = torch.randint(256, (3 * n, *shape[1:], shape[0]), generator=seeded(0), dtype=torch.uint8)
    parts = np.arange(3 * n).reshape(3, n)
    labels = torch.arange(3 * n) % classes
    return world_from_tensors(
        method,
        Training(steps=1, batch_size=n),
        partial(build, model, shape, classes, seed=0),
        pictures,
        labels,
        list(parts[:2]),
        classes=classes,
        rounds=len(method.stages(2)),
        public=torch.from_numpy(parts[2]),
        mean=(0.5,) * shape[0],
        std=(0.5,) * shape[0],
    )


def ledger(method: Method, model: str = "simple-cnn", shape: Shape = (1, 28, 28), classes: int = 10) -> Ledger:
    """The costs of the second round, in which whatever the first one made is there, and of rounds of another kind."""
    world = made_up(method, model, shape, classes)
    server = method.init_server(world.server_site(0, "init"))
    states: list[Payload] = [{}, {}]
    costs: dict[str, tuple[Sizes, Sizes]] = {}
    with one_thread():
        for round, stage in enumerate(method.stages(2)):
            broadcast, updates = method.broadcast(server), []
            for client in range(2):
                update, states[client] = method.client(world.site(client, round, stage), broadcast, states[client])
                updates.append(update)
            costs[stage] = (size_of(broadcast), size_of(updates[0].payload))
            server = method.aggregate(world.server_site(round, stage), server, iter(updates))
    down, up = costs.pop("train")
    return Ledger(down, up, size_of(states[0]), size_of(server), costs)


def beyond(one: Sizes, other: Sizes) -> int:
    """Bytes of one payload more than of another; negative where it is the smaller."""
    return sum(one.values()) - sum(other.values())
