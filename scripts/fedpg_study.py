"""Figures on FedPG: its virtual images, their effect on features and on clients, and their cost.

    python scripts/fedpg_study.py                                               # digits, about a minute
    python scripts/fedpg_study.py --data fmnist --split sample:keep=3000+two-class

Writes to the folder --out:
images.png    virtual images of each class with both presets. The title has the share of them whose feature is
              closest to the real prototype of their class, and the test accuracy of a new net trained on them alone.
features.png  t-SNE of the test set's features with the global models of FedAvg and FedPG (the paper's Fig. 6 a, c).
classes.png   accuracy by class of every client's model on the test set after its last local training (Fig. 6 b).
cost.png      CPU seconds per round on the server and on all clients (Table 3). The printed energy is an estimate:
              CPU seconds times --watts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch import Tensor

from fedskew.core.fit import fit
from fedskew.core.method import Method
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.evaluation.scores import per_class, score
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.federation.wire import size_of
from fedskew.federation.world import World
from fedskew.methods._shared.generators import nearest_is_own
from fedskew.methods._shared.prototypes import GROUP
from fedskew.methods._shared.virtual import virtual_labels
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedpg import VIRTUAL, FedPG

METHODS: dict[str, Method] = {
    "FedAvg": FedAvg(),
    "FedPG": FedPG(source="generator"),
    "FedPG, preset paper": FedPG(preset="paper"),
    "FedPG, gen cnn": FedPG(source="generator", gen="cnn"),
}
COLUMNS, POINTS = 10, 600  # virtual images shown of a class; test samples in a t-SNE


@dataclass
class Outcome:
    """The outcome of a run of one method."""

    method: Method
    world: World
    server: Payload  # the server's last state
    clients: dict[int, Payload]  # the clients' last models
    server_seconds: float  # CPU time per round
    client_seconds: float  # CPU time per round, over all clients
    bytes_down: dict[str, int]  # to one client in the last round

    def test(self) -> Data:
        """The server's test set."""
        return self.world.test_set(0, len(self.world.y_test))

    def by_class(self, model: Payload) -> list[float]:
        """The test accuracy of a model for each class."""
        site = self.world.server_site(0, "evaluate")
        return [a or 0.0 for a in per_class(score(site.frozen(model), self.test(), self.world.classes))]


def train(experiment: Experiment) -> Outcome:
    """Run an experiment in this process and measure CPU time."""
    assembled = assemble(experiment)
    method, world = experiment.method, assembled.world
    server = method.init_server(world.server_site(0, "init"))
    at_clients = at_server = 0.0
    for round in range(experiment.rounds):
        broadcast, began = method.broadcast(server), time.process_time()
        updates = {c: world.train_client(c, round, "train", broadcast, {}).update for c in assembled.cohort(round)}
        trained = time.process_time()
        server = method.aggregate(world.server_site(round, "train"), server, iter(updates.values()))
        at_clients += trained - began
        at_server += time.process_time() - trained
    clients = {c: update.payload for c, update in updates.items()}
    rounds = experiment.rounds
    return Outcome(method, world, server, clients, at_server / rounds, at_clients / rounds, size_of(broadcast))


def draw_images(panel: Any, outcome: Outcome) -> str:
    """Draw a row of virtual images for each class; returns the title."""
    method, world, images = outcome.method, outcome.world, outcome.server[VIRTUAL]["images"]
    assert isinstance(method, FedPG)
    site = world.server_site(0, "evaluate")
    with torch.no_grad():
        z = site.frozen(outcome.server).body(method.seen(images, site.data))
    near = nearest_is_own(z, virtual_labels(world.classes, method.n_v), outcome.server[GROUP])
    grid = images.view(world.classes, method.n_v, *images.shape[1:])[:, :COLUMNS]
    picture = tiled(grid)
    height = len(picture) / world.classes
    panel.imshow(picture, cmap="gray", vmin=0, vmax=1)
    rows = range(world.classes)
    panel.set(xticks=[], yticks=[(row + 0.5) * height for row in rows], yticklabels=rows, ylabel="class")
    alone = f"a net trained on them alone: {100 * accuracy_of_virtual_training(outcome):.1f} %"
    return f"{100 * near:.0f} % closest to the prototype of their class, {alone}"


def accuracy_of_virtual_training(outcome: Outcome) -> float:
    """The test accuracy of a new net after 20 epochs on the virtual images alone."""
    method, world, images = outcome.method, outcome.world, outcome.server[VIRTUAL]["images"]
    assert isinstance(method, FedPG)
    site, labels = world.server_site(0, "train"), virtual_labels(world.classes, method.n_v)
    site.load()
    alone = replace(site, data=Data(method.seen(images, site.data), labels, torch.arange(len(labels))))
    fit(alone, site.loss, training=Training(optimiser="adam", lr=1e-3, batch_size=method.virtual_batch, epochs=20))
    return score(site.net, outcome.test(), world.classes).accuracy


def tiled(grid: Tensor) -> Tensor:
    """[rows, columns, channels, h, w] in [-1, 1] as one picture in [0, 1] with white lines between the images."""
    framed = torch.nn.functional.pad((grid + 1) / 2, (1, 1, 1, 1), value=1.0)
    rows, columns, channels, h, w = framed.shape
    picture = framed.permute(0, 3, 1, 4, 2).reshape(rows * h, columns * w, channels)
    return picture[:, :, 0] if channels == 1 else picture


def draw_features(panel: Any, outcome: Outcome) -> str:
    """Draw a t-SNE of the features of test samples; returns the title."""
    site, test = outcome.world.server_site(0, "evaluate"), outcome.test()
    some = test.part(torch.arange(min(POINTS, len(test))))
    z = site.infer(site.frozen(outcome.server).body, some)
    flat = TSNE(random_state=0, init="pca", perplexity=min(30, len(some) // 4)).fit_transform(z.numpy())
    points = panel.scatter(*flat.T, c=some.labels, s=6, cmap="tab10")
    panel.legend(*points.legend_elements(num=None), title="class", fontsize=7, title_fontsize=7)
    panel.set(xticks=[], yticks=[])
    return f"accuracy {100 * sum(outcome.by_class(outcome.server)) / outcome.world.classes:.1f} %"


def draw_classes(panel: Any, outcome: Outcome) -> str:
    """Draw the accuracy of each client's model by class; returns the title."""
    table = torch.tensor([outcome.by_class(model) for model in outcome.clients.values()])
    shown = panel.imshow(table, vmin=0, vmax=1, aspect="auto")
    panel.figure.colorbar(shown, ax=panel, label="accuracy")
    panel.set(xlabel="class", xticks=range(outcome.world.classes))
    panel.set(ylabel="client", yticks=range(len(table)), yticklabels=list(outcome.clients))
    return f"mean {100 * table.mean():.1f} %, classes below 1 %: {100 * (table < 0.01).float().mean():.0f} %"


def draw_cost(panel: Any, outcomes: dict[str, Outcome], watts: float, rounds: int) -> None:
    """Print and draw the costs of each method."""
    print(f"{'CPU seconds per round':26}{'server':>8}{'clients':>9}{'Wh in all':>11}{'bytes to a client':>19}")
    for name, outcome in outcomes.items():
        both = outcome.server_seconds + outcome.client_seconds
        energy = both * rounds * watts / 3600
        row = f"{name:26}{outcome.server_seconds:8.2f}{outcome.client_seconds:9.2f}{energy:11.4f}"
        print(row + f"{sum(outcome.bytes_down.values()):19,}")
    for part, bottom in (("client_seconds", 0), ("server_seconds", 1)):
        heights = [getattr(o, part) for o in outcomes.values()]
        below = [o.client_seconds if bottom else 0 for o in outcomes.values()]
        panel.bar(range(len(outcomes)), heights, bottom=below, label=part.split("_")[0])
    panel.set(xticks=range(len(outcomes)), xticklabels=list(outcomes), ylabel="CPU seconds per round")
    panel.legend()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--split", default="two-class")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--watts", type=float, default=10.0, help="power of one busy core")
    parser.add_argument("--out", type=Path, default=Path("fedpg"), help="folder to write to")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    training = Training(lr=given.lr, batch_size=64, epochs=given.epochs, clip=5.0)
    base = Experiment(
        data=given.data, split=given.split, model=given.model, rounds=given.rounds, seed=given.seed, training=training
    )
    with one_thread():
        outcomes = {name: train(replace(base, method=method)) for name, method in METHODS.items()}
    given.out.mkdir(parents=True, exist_ok=True)
    panels: dict[str, tuple[Any, list[str]]] = {
        "images": (draw_images, ["FedPG", "FedPG, preset paper"]),
        "features": (draw_features, ["FedAvg", "FedPG"]),
        "classes": (draw_classes, ["FedAvg", "FedPG"]),
    }
    for part, (draw, names) in panels.items():
        figure = Figure(figsize=(10, 5.4), layout="constrained")
        for panel, name in zip(figure.subplots(1, 2), names, strict=True):
            title = draw(panel, outcomes[name])
            panel.set_title(f"{name}\n{title}", fontsize=8)
            print(f"{part:9} {name:20} {title}")
        figure.savefig(given.out / f"{part}.png", dpi=110)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    draw_cost(figure.subplots(), outcomes, given.watts, given.rounds)
    figure.savefig(given.out / "cost.png", dpi=110)
    print(f"figures: {given.out}")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
