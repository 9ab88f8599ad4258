"""What counting predictions costs: the time of an evaluation with counts over that of accuracy and loss alone.

    python benchmarks/evaluation.py [--repeat 30]

Both are run in turn on the same net and samples, in one thread, and the median of the ratios of neighbouring runs is
printed: what else the machine does hits both alike. Small clients of a small net are the worst case, because counting
takes a fixed time on top of a sample's share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedskew.core.net import outputs
from fedskew.core.samples import Data, pieces
from fedskew.core.seeding import Purpose
from fedskew.evaluation.scores import BATCH, ClientScore
from fedskew.evaluation.summary import Summary
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.federation.world import CHUNK, World

CASES = {
    "digits, MLP, 10 clients of about 29": Experiment(),
    "digits, MLP, 100 clients of about 3": Experiment(split="iid:clients=100"),
    "mnist, CNN, 100 clients of about 120": Experiment(data="mnist", split="dirichlet:alpha=0.3,clients=100"),
    "mnist, MLP, 1000 clients of about 12": Experiment(data="mnist", model="mlp", split="iid:clients=1000"),
}


@torch.no_grad()
def plain(net: nn.Module, data: Data, classes: int) -> tuple[Tensor, Tensor, float]:
    """Accuracy and loss alone: correct and total by class, sum of the losses."""
    correct, total, loss = torch.zeros(classes).long(), torch.zeros(classes).long(), 0.0
    for positions in pieces(len(data), BATCH):
        x, y = data.take(positions)
        logits = outputs(net, net, x, batch_statistics=False)
        correct += torch.bincount(y[logits.argmax(1) == y], minlength=classes)
        total += torch.bincount(y, minlength=classes)
        loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    return correct, total, loss


def without_counts(world: World) -> None:
    """Evaluate the global model on the test set and on all clients, accuracy and loss only."""
    model = world.method.broadcast(world.initial)
    for chunk in range(world.chunks()):
        site = world.site(-1, 0, "evaluate", Purpose.EVALUATE)
        site.load(model)
        end = min((chunk + 1) * CHUNK, len(world.y_test))
        plain(site.net, world.test_set(chunk * CHUNK, end), world.classes)
    for client in range(world.population):
        site = world.site(client, 0, "evaluate", Purpose.EVALUATE)
        site.load(model)
        plain(site.net, world.pool(world.test[client], client), world.classes)


def with_counts(world: World) -> None:
    """The same as a run does it."""
    model = world.method.broadcast(world.initial)
    summary = Summary()
    for chunk in range(world.chunks()):
        summary.add_test(world.evaluate_global(chunk, 0, model))
    for client in range(world.population):
        score = world.evaluate_client(client, 0, model, {}, trained=True)
        assert isinstance(score, ClientScore)
        summary.add(score)
    summary.metrics(False, {})


def seconds(work: Callable[[World], None], world: World) -> float:
    """How long it takes."""
    start = time.process_time()
    work(world)
    return time.process_time() - start


def main() -> None:
    """Print the ratio of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=30, help="pairs of runs of each case")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of data sets")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, experiment in CASES.items():
        world = assemble(experiment, data_dir=given.data_dir).world
        pairs = [(seconds(without_counts, world), seconds(with_counts, world)) for _ in range(given.repeat + 1)][1:]
        ratio = statistics.median(b / a for a, b in pairs)
        each = statistics.median(a for a, _ in pairs)
        print(f"{name:<40} {1000 * each:8.1f} ms without counts, {ratio:.3f} times that with them")


if __name__ == "__main__":
    main()
