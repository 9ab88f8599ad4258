"""Small federations for tests: the two quadratics of the oracles, and a few digits with any net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.data.sources.loading import load
from fedskew.data.split.chain import make_partition
from fedskew.data.split.partition import portion
from fedskew.federation.loop import run
from fedskew.federation.make_world import make_world, world_from_tensors
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.world import World
from fedskew.models import build


class Scalar(nn.Module):
    """One double parameter, w."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def quadratic(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """a/2 (w - b)^2 for samples x = (a, b)."""
    return (0.5 * x[:, 0] * (net.w - x[:, 1]).square()).mean()


def toy_q(method: Method, *, training: Training | None = None, start: float = 0.0) -> World:
    """Toy Q: f_1 = 1/2 (w-1)^2 on 1 sample, f_2 = 3/2 (w+1)^2 on 3, so p = (1/4, 3/4); lr 0.1, 2 full steps."""
    x = torch.tensor([[1.0, 1.0], [3.0, -1.0], [3.0, -1.0], [3.0, -1.0]], dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    clients = [np.array([0]), np.array([1, 2, 3])]
    training = training or Training(lr=0.1, steps=2, batch_size=4)
    return world_from_tensors(
        method, training, partial(Scalar, start), x, y, clients, classes=2, rounds=10, loss=quadratic
    )


def rounds(world: World, count: int, cohorts: Sequence[Sequence[int]] | None = None) -> tuple[list[Record], Simulation]:
    """Rounds of a world's method through the real loop, in this process; no evaluation."""
    simulation = Simulation(world)
    members = list(range(world.population))

    def cohort(round: int) -> list[int]:
        return list(cohorts[round]) if cohorts is not None else members

    records = list(run(world.method, simulation, world.server_site, count, cohort, evaluate=lambda round: False))
    return records, simulation


def w_of(record: Record, group: str = "parameters") -> float:
    return float(record.server[group]["w"])


def digits(
    method: Method,
    *,
    split: str = "dirichlet:alpha=0.5,clients=5,min=5",
    model: str = "mlp",
    training: Training | None = None,
    count: int = 3,
    seed: int = 0,
    test: float = 0.2,
    fast: bool = True,
    **options: Any,
) -> World:
    """A small, skewed federation on scikit-learn's digits."""
    data = load("digits")
    data = replace(
        data, x_train=data.x_train[:400], y_train=data.y_train[:400], x_test=data.x_test[:100], y_test=data.y_test[:100]
    )
    partition = make_partition(split, data.y_train, seed=seed, classes=data.classes)
    make = partial(build, model, data.shape, data.classes, seed=seed, fast=fast, **options)
    training = training or Training(lr=0.1, batch_size=16, epochs=1)
    parts = portion(partition, test=test, seed=seed)
    stages = len(method.stages(count))
    return make_world(
        data, partition, parts, method=method, training=training, make_net=make, seed=seed, rounds=stages, fast=fast
    )


def same(a: Payload, b: Payload) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(
        a[g].keys() == b[g].keys() and all(torch.equal(a[g][n], b[g][n]) for n in a[g]) for g in a
    )
