"""Draws the problem that FedMR solves: features of a client that lacks a class, with FedAvg and with FedMR.

As in Sec. 3.2 of the paper: three classes, uniform on discs of radius 1/2; three clients with two classes each;
two-dimensional features. Collapse: the features of a class are close to a line (r^2 is the squared correlation of
their two dimensions). Invasion: other classes occupy the region of the class that a client lacks (the shading shows
the prediction of the head). Prints means over seeds. FedMR prevents the collapse with every seed; a client's
accuracy on the class it lacks is above FedAvg's after 3 rounds (drawn) but below it after 2.

python scripts/feature_collapse.py --out collapse.png
"""

import argparse
import math
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.net import Net
from fedskew.core.seeding import seeded
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.world import World
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedmr import FedMR, intra_class

CENTRES = torch.tensor([[1.0, 0.0], [0.0, math.sqrt(3)], [0.0, -math.sqrt(3)]])
COLOURS = ("tab:blue", "tab:orange", "tab:green")
EACH, ROUNDS, SEEDS = 300, 3, 5
APART = [(0, 1), (0, 2), (1, 2)]
CASES: dict[str, tuple[Method, list[Any]]] = {
    "FedAvg, all classes everywhere": (FedAvg(), [(0, 1, 2)] * 3),
    "FedAvg, two classes a client": (FedAvg(), APART),
    "FedMR, two classes a client": (FedMR(mu1=0.1, mu2=0.1, intra_form="norm"), APART),
}


def net(seed: int) -> Net:
    """An MLP with two-dimensional features."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    return Net(body, nn.Linear(2, 3), 2)


def trained(method: Method, classes: list[tuple[int, ...]], seed: int) -> tuple[World, dict[str, Payload]]:
    """Train with one client per tuple of classes; returns the world, and the last models of client 1 and the server.

    The model of client 1 is the one after its last local training.
    """
    y = torch.arange(3).repeat_interleave(EACH)
    turn, far = torch.rand(2, len(y), generator=seeded(seed))
    x = CENTRES[y] + torch.view_as_real(torch.polar(far.sqrt() / 2, 2 * math.pi * turn))
    held = [np.flatnonzero(np.isin(y, c)) for c in classes]
    training = Training(lr=0.05, momentum=0.9, batch_size=64, epochs=10)
    world = world_from_tensors(
        method, training, lambda: net(seed), x, y, held, classes=3, rounds=ROUNDS, seed=seed, test=(x, y)
    )
    *_, before, last = run(method, Simulation(world), world.server_site, ROUNDS, lambda _: [0, 1, 2])
    client = world.train_client(0, ROUNDS - 1, "train", method.broadcast(before.server), {}).update.payload
    return world, {"client 1": client, "server": last.server}


def measured(world: World, model: Payload) -> tuple[Net, Tensor, list[float]]:
    """(net, features of all samples, [r^2 of the first client's classes, accuracy of each class])."""
    site = world.site(0, ROUNDS, "evaluate")
    frozen: Net = site.frozen(model)
    z, y = site.infer(frozen.body, world.pool(torch.arange(len(world.y)))), world.y
    right = (frozen.head(z).argmax(1) == y).float()
    return frozen, z, [intra_class(z[y < 2], y[y < 2], "norm").item(), *(right[y == c].mean().item() for c in range(3))]


def draw(panel: Any, frozen: Net, z: Tensor, y: Tensor) -> None:
    """Draw the features and, as shading, the class that the head predicts at each point."""
    line = torch.linspace(-1.15, 1.15, 200) * (z - z.mean(0)).abs().max()  # one scale for both dimensions
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=2) + z.mean(0)
    predicted = frozen.head(grid).argmax(2)
    panel.contourf(*grid.permute(2, 0, 1), predicted, levels=[-0.5, 0.5, 1.5, 2.5], colors=COLOURS, alpha=0.15)
    for c, colour in enumerate(COLOURS):
        panel.scatter(*z[y == c].T, s=5, color=colour, label=f"class {c + 1}")
    panel.set_aspect("equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", default="collapse.png", help="file to write")
    out = parser.parse_args().out
    figure, summary = Figure(figsize=(12, 8.4), layout="constrained"), "r^2 {:.2f}, accuracy {:.2f} {:.2f} {:.2f}"
    panels = figure.subplots(2, len(CASES))
    for column, (title, (method, classes)) in enumerate(CASES.items()):
        runs = [trained(method, classes, seed) for seed in range(SEEDS)]
        for panel, who in zip(panels[:, column], ("client 1", "server"), strict=True):
            results = [measured(world, models[who]) for world, models in runs]
            means = torch.tensor([values for *_, values in results]).mean(0).tolist()
            print(f"{title:32}{who:10}", summary.format(*means))
            draw(panel, *results[0][:2], runs[0][0].y)
            panel.set_title(f"{title}\n{who}: {summary.format(*results[0][2])}", fontsize=10)
    panels[0, 0].legend(loc="best", fontsize=8)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
