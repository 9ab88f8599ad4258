"""How far the predictors of two clients drift apart: the study of Fig. 1 of FedCRC.

    python scripts/predictor_distance.py                  # digits, seconds
    python scripts/predictor_distance.py --data mnist     # the paper's, with its four-layer CNN

Two clients train from one common model, pre-trained on all the data, and we follow the L2 distance of
their heads over the updates, with IID and with skewed shares. The paper does not say for how long the
model was pre-trained, nor the learning rate; "two clients train predictors" is read as: the head alone
(`--part all` trains the whole net).
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
    """The common model: trained on all the data in one place."""
    site = assemble(replace(experiment, split="iid:clients=1")).world.site(0, 0, "train")
    site.load()
    fit(site, site.loss, epochs=epochs)
    return site.model()


def heads(site: Site, start: Payload, part: str, updates: int) -> Tensor:
    """The head before every update and after the last  # [updates + 1, parameters of the head]."""
    seen = []

    def look(net: Net) -> None:
        seen.append(parameters_to_vector(net.head.parameters()).detach().clone())

    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        look(net)
        return site.loss(net, x, y)

    site.load(start)
    fit(site, loss, train=PARTS[part], steps=updates)
    look(site.net)
    return torch.stack(seen)


def distances(experiment: Experiment, start: Payload, part: str, updates: int) -> Tensor:
    """|theta_0 - theta_1| of the two clients  # [updates + 1]."""
    world = assemble(experiment).world
    first, second = (heads(world.site(client, 0, "train"), start, part, updates) for client in (0, 1))
    apart: Tensor = (first - second).norm(dim=1)
    return apart


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", help="default: cnn4 on mnist, as in the paper, else auto")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the skewed shares; the paper's beta")
    parser.add_argument("--part", choices=PARTS, default="head", help="what the clients train")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=1, help="of pre-training")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("predictor_distance.png"))
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
    except UsageError as mistake:
        raise SystemExit(f"error: {mistake}") from None
