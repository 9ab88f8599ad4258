"""The simulator on a workload, one round at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from bare import NETS as MODULES
from workloads import Workload, cohort, images

from fedskew.core.method import Method
from fedskew.core.net import Net
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.world import World
from fedskew.methods import REGISTRY
from fedskew.models import build, wrap
from fedskew.models.own import find_head
from fedskew.models.quick import own_net

NETS = {"lenet": ("simple-cnn", {"projection": False}), "mcmahan": ("cnn", {})}


def world_of(workload: Workload, method: Method, *, fast: bool = True, own: bool = False) -> World:
    """The world of a workload: client c has the c-th slice of the images.

    fast: False uses torch's own layers. own: the net is the bare loop's, as a user's own module.
    """
    x, y = images(workload)
    held = [np.arange(c * workload.samples, (c + 1) * workload.samples) for c in range(workload.clients)]
    name, options = NETS[workload.net]
    training = Training(lr=workload.lr, momentum=workload.momentum, batch_size=workload.batch, epochs=workload.epochs)
    pool, labels = torch.from_numpy(x), torch.from_numpy(y)
    make: Callable[[], Net] = partial(build, name, (1, 28, 28), 10, seed=0, fast=fast, **options)
    if own:
        module = MODULES[workload.net]()
        make = partial(own_net, partial(wrap, module, find_head(module, 10)), (1, 28, 28), fast)
    test = (pool[:10000], labels[:10000])
    return world_from_tensors(
        method, training, make, pool, labels, held,
        classes=10, rounds=1000, test=test, mean=(0.5,), std=(0.5,), fast=fast,
    )  # fmt: skip


class Ours:
    """The simulator on a workload, with `workers` processes and the workload's method unless `method` is given."""

    def __init__(
        self,
        workload: Workload,
        *,
        fast: bool = True,
        own: bool = False,
        method: Method | None = None,
        workers: int = 2,
    ) -> None:
        self.workload = workload
        world = world_of(workload, method or REGISTRY[workload.method](), fast=fast, own=own)
        self.simulation = Simulation(world, workers=workers)
        self.loop: Iterator[Record] = run(
            world.method, self.simulation, self.simulation.world.server_site, 1000,
            lambda round: cohort(workload, round), evaluate=lambda round: False,
        )  # fmt: skip
        self.round()

    def round(self, number: int = 0) -> None:
        """Train the next round. `number` is ignored: the simulator counts rounds itself."""
        self.last = next(self.loop)

    def evaluate(self) -> None:
        """Evaluate the model on the server's test set of 10,000 samples."""
        self.simulation.evaluate(0, self.simulation.world.method.broadcast(self.last.server))

    def pids(self) -> list[int]:
        """The worker processes."""
        return [w.process.pid for w in self.simulation.pool.workers] if self.simulation.pool else []

    def close(self) -> None:
        """End the worker processes."""
        self.simulation.close()
