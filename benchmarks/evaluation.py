"""What counting predictions costs: the time of a run's evaluation over that of accuracy and loss alone.

    python benchmarks/evaluation.py [--repeat 30] [--only heart]

Both are `Simulation.evaluate`, as a run calls it: the same jobs, batches and sites, in one thread. The plain one keeps
no predictions: its figures are accuracy and loss of each client, their mean, spread and worst tenth. They are run in
turn on the same net and samples, and the median of the ratios of neighbouring runs is printed: what else the machine
does hits both alike. Few small clients of a small net are the worst case, because counting takes a fixed time on top
of a sample's share. "own models": each client has a head of its own, so every one is evaluated twice, and alone.

The goal is 1.10. Where an evaluation takes a few milliseconds, most of the counting is a fixed time and the ratio is at
the edge: more pairs are needed there, about 200. What a user feels of a miss is printed beside it: the share of a whole
round (training, evaluation, record) that counting takes. Ends with exit code 1 if a case misses the goal.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.core.net import outputs
from fedskew.core.samples import Data, pieces, take_together
from fedskew.core.seeding import Purpose
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.data.dataset import DataSet
from fedskew.evaluation.bins import IntArray
from fedskew.evaluation.scores import BATCH, ClientScore, Score, Together
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import encode
from fedskew.federation.world import World
from fedskew.methods.fedper import FedPer

GOAL = 1.10  # times the time without counts
ROUNDS = 6  # that a round's time is measured over


def hundred_classes() -> DataSet:
    """Made-up colour images of 100 classes: 20,000 for the clients, 5,000 for the server's test set."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (25_000, 32, 32, 3), np.uint8)
    y = rng.permutation(np.arange(25_000) % 100)
    return DataSet(
        "noise", x[:20_000], y[:20_000], x[20_000:], y[20_000:], classes=100, mean=(0.5,) * 3, std=(0.3,) * 3
    )


CASES = {
    "heart, MLP, 4 hospitals, 2 classes": lambda: Experiment(data="heart", split="natural"),
    "digits, MLP, 10 clients of about 29": lambda: Experiment(),
    "digits, MLP, 10 clients, own models": lambda: Experiment(method=FedPer()),
    "digits, MLP, 100 clients of about 3": lambda: Experiment(split="iid:clients=100"),
    "mnist, CNN, 100 clients of about 120": lambda: Experiment(data="mnist", split="dirichlet:alpha=0.3,clients=100"),
    "mnist, MLP, 1000 clients of about 12": lambda: Experiment(data="mnist", model="mlp", split="iid:clients=1000"),
    "100 classes, MLP, 100 clients of 40": lambda: Experiment(
        data=hundred_classes(), model="mlp", split="iid:clients=100"
    ),
    "100 classes, CNN, 100 clients of 40": lambda: Experiment(data=hundred_classes(), split="iid:clients=100"),
}


class Plain(Together):
    """Clients that were evaluated together, without their predictions."""

    tables: tuple[IntArray, IntArray]

    def by_class(self) -> tuple[IntArray, IntArray]:
        return self.tables


class PlainWorld(World):
    """A world that evaluates without counting: the right answers and the samples by class, and the loss."""

    @torch.no_grad()
    def plain(self, net: nn.Module, data: Data) -> Score:
        correct, total, loss = torch.zeros(self.classes).long(), torch.zeros(self.classes).long(), 0.0
        for positions in pieces(len(data), BATCH):
            x, y = data.take(positions)
            logits = outputs(net, net, x, batch_statistics=False)
            correct += torch.bincount(y[logits.argmax(1) == y], minlength=self.classes)
            total += torch.bincount(y, minlength=self.classes)
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
        return Score(tuple(correct.tolist()), tuple(total.tolist()), loss)

    def _evaluate_shared(self, site: Site, broadcast: Payload, data: Data) -> Score:
        site.load(broadcast)
        return self.plain(site.net, data)

    def evaluate_client(
        self, client: int, round: int, broadcast: Payload, state: Payload, trained: bool, *, validation: bool = False
    ) -> ClientScore:
        site = self.site(client, round, "evaluate", Purpose.EVALUATE)
        test_part = self.pool(self.test[client], client)
        shared = self._evaluate_shared(site, broadcast, test_part) if self.method.has_global else None
        if shared is not None and self.uses_shared_model(state):
            return ClientScore(client, shared, shared, fallback=not trained)
        site.load(self.method.personalise(site, broadcast, state))
        return ClientScore(client, shared, self.plain(site.net, test_part), fallback=not trained)

    @torch.no_grad()
    def evaluate_together(self, clients: Sequence[int], round: int, broadcast: Payload) -> Together:
        site = self.site(-1, round, "evaluate", Purpose.EVALUATE)
        site.load(broadcast)
        parts = [self.pool(self.test[c], c) for c in clients]
        sizes, right, labels, losses, start = [len(part) for part in parts], [], [], [], 0
        while start < len(parts):
            end, count = start, 0
            while end < len(parts) and count + sizes[end] <= BATCH:
                count += sizes[end]
                end += 1
            x, y = take_together(parts[start:end])
            logits = outputs(site.net, site.net, x, batch_statistics=False)
            right.append(logits.argmax(1) == y)
            labels.append(y)
            losses.append(nn.functional.cross_entropy(logits, y, reduction="none"))
            start = end
        each = [float(loss.sum()) for loss in torch.split(torch.cat(losses).double(), sizes)]
        place = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * self.classes + torch.cat(labels)
        found = Plain(None, sizes, each)
        found.tables = self.by_client(place[torch.cat(right)], len(sizes)), self.by_client(place, len(sizes))
        return found

    def by_client(self, places: Tensor, clients: int) -> IntArray:
        return torch.bincount(places, minlength=clients * self.classes).view(-1, self.classes).numpy()


def plain_world(world: World) -> PlainWorld:
    """The same world, evaluated without counting."""
    return PlainWorld(**{f.name: getattr(world, f.name) for f in dataclasses.fields(world)})


def ready(world: World) -> Simulation:
    """A simulation whose clients all have a state, as after the first round of each."""
    simulation = Simulation(world)
    own = {group: tensors for group, tensors in world.initial.items() if group == "parameters"}
    heads = {group: type(t)({n: v for n, v in t.items() if n.startswith("head.")}) for group, t in own.items()}
    for client in range(world.population if world.method.personal else 0):
        simulation.store.stage(client, 0, encode(heads))
    simulation.store.commit(range(world.population if world.method.personal else 0))
    return simulation


def seconds(simulation: Simulation, model: Payload) -> float:
    """How long an evaluation takes."""
    start = time.process_time()
    simulation.evaluate(0, model)
    return time.process_time() - start


def round_seconds(experiment: Experiment, data_dir: Path | None) -> float:
    """How long a round of a run takes that is evaluated every round, in one process: the median."""
    every = dataclasses.replace(experiment.evaluation, every=1)
    trained = run(dataclasses.replace(experiment, rounds=ROUNDS, evaluation=every), workers=1, data_dir=data_dir)
    ends = [time.process_time() for _ in trained]
    return statistics.median(b - a for a, b in pairwise(ends))


def main() -> int:
    """Print the ratio of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=30, help="pairs of runs of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of data sets")
    given = parser.parse_args()
    torch.set_num_threads(1)
    missed = 0
    for name, experiment in CASES.items():
        if given.only not in name:
            continue
        world = assemble(experiment(), data_dir=given.data_dir).world
        model = world.method.broadcast(world.initial)
        without, counted = ready(plain_world(world)), ready(world)
        pairs = [(seconds(without, model), seconds(counted, model)) for _ in range(given.repeat + 3)][3:]
        ratio = statistics.median(b / a for a, b in pairs)
        each, more = statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)
        felt = more / round_seconds(experiment(), given.data_dir) if ratio > GOAL else 0.0
        missed += ratio > GOAL
        print(
            f"{name:<40} {1000 * each:8.1f} ms without counts, {1000 * more:5.2f} ms more with them: {ratio:.3f} times "
            f"{f'FAIL, {100 * felt:.1f} % of a round' if felt else 'pass'}",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
