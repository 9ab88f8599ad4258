"""The communication and storage costs of a method, measured in two rounds on random samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedskew.core.method import Method
from fedskew.core.net import Shape
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.wire import size_of
from fedskew.federation.world import World
from fedskew.models import build

Sizes = dict[str, int]  # bytes by group of a payload


@dataclass(frozen=True)
class Costs:
    """The costs of a method in bytes, by group of the payload."""

    down: Sizes  # server to one client, in one training round
    up: Sizes  # one client to the server
    client: Sizes  # state of one client between rounds
    server: Sizes  # state of the server
    once: dict[str, tuple[Sizes, Sizes]]  # (down, up) of stages other than "train", by name


def random_world(method: Method, model: str | Callable[[], Any], shape: Shape, classes: int) -> World:
    """Two clients and a public set with random samples, two of each class, and one training step per round.

    `model` is a net's name, or a function that builds one.
    """
    n = 2 * classes
    is_table = len(shape) == 1  # its values are numbers, and are not normalised again
    size = (3 * n, *shape[1:], shape[0])
    samples = torch.randint(256, size, generator=seeded(0), dtype=torch.float32 if is_table else torch.uint8)
    channels = 0 if is_table else shape[0]
    parts = np.arange(3 * n).reshape(3, n)
    labels = torch.arange(3 * n) % classes
    return world_from_tensors(
        method,
        Training(steps=1, batch_size=n),
        partial(build, model, shape, classes, seed=0) if isinstance(model, str) else model,
        samples / 256 if is_table else samples,
        labels,
        list(parts[:2]),
        classes=classes,
        rounds=len(method.stages(2)),
        public=torch.from_numpy(parts[2]),
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )


def measure_costs(
    method: Method, model: str | Callable[[], Any] = "simple-cnn", shape: Shape = (1, 28, 28), classes: int = 10
) -> Costs:
    """The costs of a method for a model (a name, or a function that builds a net), samples of `shape` and classes.

    Training rounds are measured in the second one, in which everything the method sends exists.
    """
    world = random_world(method, model, shape, classes)
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
    return Costs(down, up, size_of(states[0]), size_of(server), costs)


def extra_bytes(one: Sizes, other: Sizes) -> int:
    """How many bytes one payload has more than another; negative if it has fewer."""
    return sum(one.values()) - sum(other.values())
