"""The small federation on which laws are checked, and ways to run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from fedskew.core.files import sha256
from fedskew.core.method import Method, Update
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.federation.loop import run
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.federation.world import World

ROUNDS = 2  # of most laws
SPLIT = "sample:keep=400+dirichlet:alpha=0.5,clients=5,min=5"
PUBLIC = "public:per_class=4+"  # put before the split of a method that needs public data


@dataclasses.dataclass(frozen=True)
class Subject:
    """A method to check, and the net it is checked with."""

    method: Method
    model: str = "mlp:hidden=32"

    def world(
        self,
        *,
        method: Method | None = None,
        batch_norm: Any = "aggregate",
        split: str = SPLIT,
        rounds: int = ROUNDS,
        seed: int = 0,
    ) -> World:
        """A fresh small federation."""
        experiment = Experiment(
            method=method or self.method,
            split=PUBLIC + split if self.method.public else split,
            model=self.model,
            rounds=rounds,
            seed=seed,
            training=Training(lr=0.1, batch_size=16, batch_norm=batch_norm),
        )
        return assemble(experiment).world

    @cached_property
    def bits(self) -> list[str]:
        """Fingerprints after two rounds in a fresh federation."""
        return fingerprints(*train(self.world()))


def train(world: World, cohorts: Sequence[Sequence[int]] | None = None) -> tuple[list[Record], Simulation]:
    """Run a world's rounds in this process, without evaluation. `cohorts`: the clients of each round; None: all."""
    simulation, everyone = Simulation(world), list(range(world.population))

    def cohort(round: int) -> list[int]:
        return everyone if cohorts is None else list(cohorts[min(round, len(cohorts) - 1)])

    records = run(world.method, simulation, world.server_site, world.rounds, cohort, evaluate=lambda round: False)
    return list(records), simulation


def fingerprints(records: Sequence[Record], simulation: Simulation) -> list[str]:
    """Fingerprints of the server's last state and of every client's."""
    store = simulation.store
    return [digest(records[-1].server), *(sha256(store.get(c)) for c in range(simulation.population))]


def equal(a: Payload, b: Payload, tolerance: float = 0.0) -> bool:
    """Whether two payloads are the same: groups, names, types, shapes and values; NaN is equal to NaN."""

    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        fits = (x.dtype, x.shape) == (y.dtype, y.shape)
        return fits and torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)

    return a.keys() == b.keys() and all(
        a[g].keys() == b[g].keys() and all(same(a[g][n], b[g][n]) for n in a[g]) for g in a
    )


def one_round(
    world: World, server: Payload, states: dict[int, Payload], round: int, stage: str = "train"
) -> tuple[Payload, list[Update]]:
    """One round with all clients, hook by hook; `states` is filled."""
    method, updates = world.method, []
    broadcast = method.broadcast(server)
    for client in range(world.population):
        update, states[client] = method.client(world.site(client, round, stage), broadcast, states.get(client, {}))
        updates.append(update)
    return method.aggregate(world.server_site(round, stage), server, iter(updates)), updates
