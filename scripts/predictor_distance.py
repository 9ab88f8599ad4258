"""How far the heads of two clients drift apart in local training: the study of FedCRC's Fig. 1.

    python scripts/predictor_distance.py                  # digits, seconds
    python scripts/predictor_distance.py --data mnist     # the paper's, with its four-layer CNN

Two clients start from one model that was pre-trained on all data. The script draws the L2 distance of their heads
over the updates, with IID and with skewed data. The paper does not give the length of pre-training and the learning
rate. "Two clients train predictors" is taken to mean the head alone (`--part all` trains the whole net).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from fedskew.core.fit import fit
from fedskew.core.net import Net
from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = {"head": "head.", "all": ""}


def pretrained(experiment: Experiment, epochs: int) -> Payload:
    """A model trained on all data."""
    site = assemble(replace(experiment, split="iid:clients=1")).world.site(0, 0, "train")
    site.load()
    fit(site, site.loss, epochs=epochs)
    return site.model()


def heads(site: Site, start: Payload, part: str, updates: int) -> Tensor:
    """The parameters of the head before every update and after the last: [updates + 1, parameters]."""
    history = []

    def record(net: Net) -> None:
        history.append(parameters_to_vector(net.head.parameters()).detach().clone())

    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        record(net)
        return site.loss(net, x, y)

    site.load(start)
    fit(site, loss, train=PARTS[part], steps=updates)
    record(site.net)
    return torch.stack(history)


def distances(experiment: Experiment, start: Payload, part: str, updates: int) -> Tensor:
    """The distances |theta_0 - theta_1| between the heads of the two clients: [updates + 1]."""
    world = assemble(experiment).world
    first, second = (heads(world.site(client, 0, "train"), start, part, updates) for client in (0, 1))
    apart: Tensor = (first - second).norm(dim=1)
    return apart


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", help="default: cnn4 for mnist, as in the paper, otherwise auto")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet split; the paper's beta")
    parser.add_argument("--part", choices=PARTS, default="head", help="the part of the net that clients train")
    parser.add_argument("--updates", type=int, default=200, help="local updates of each client")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of pre-training")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("predictor_distance.png"), help="file to write")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    model = given.model or ("cnn4" if given.data == "mnist" else "auto")
    training = Training(lr=given.lr, batch_size=given.batch_size)
    experiment = Experiment(data=given.data, model=model, training=training, seed=given.seed)
    splits = {"IID": "iid:clients=2", f"Dirichlet {given.alpha:g}": f"dirichlet:alpha={given.alpha:g},clients=2"}
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    with one_thread():
        start = pretrained(experiment, given.epochs)
        for label, split in splits.items():
            apart = distances(replace(experiment, split=split), start, given.part, given.updates)
            axes.plot(apart.tolist(), label=label)
            print(f"{label:14} distance after {given.updates} updates: {apart[-1]:.4f}")
    axes.set(xlabel="updates", ylabel="L2 distance of the two heads", title=f"{given.data}, training {given.part}")
    axes.legend()
    figure.savefig(given.out, dpi=150)
    print(f"figure: {given.out}")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
