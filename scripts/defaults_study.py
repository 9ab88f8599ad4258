"""Measurements that defaults rest on: methods beside FedAvg with three seeds, on validation samples only.

    python scripts/defaults_study.py fedmr results/fedmr-fmnist/seeds.csv        or fedpg, fedcd, weighting

Fashion-MNIST (FEDSKEW_DATA), small: a quarter of each client's samples is held out, and the global model is evaluated
on all of these together after every round. No test sample is used. Where a part has several rates, FedAvg's learning
rate is the best of them with a seed of its own, and all methods use it. A row has the accuracy of the last round, the
mean of the last five and the curve, in %. Runs that the file has already are not repeated.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedskew.core.training import Training
from fedskew.experiment.config import Evaluation, Experiment, Holdout
from fedskew.experiment.given import method_of
from fedskew.studies.choice import choose_rate
from fedskew.studies.execution import execute

SEEDS = (100, 101, 102)
COLUMNS = ("setting", "method", "seed", "lr", "last_round", "mean_of_last_five", "curve")


class Part(NamedTuple):
    """Methods to compare in one setting."""

    setting: str
    experiment: Experiment  # of FedAvg
    methods: Sequence[str]
    rates: Sequence[float] = ()  # to choose from; (): the experiment's


def experiment(split: str, model: str, rounds: int, training: Training, clients: int | None = None) -> Experiment:
    """A run on Fashion-MNIST that is evaluated on validation samples."""
    return Experiment(
        data="fmnist",
        split=split,
        model=model,
        rounds=rounds,
        clients_per_round=clients or "all",
        training=training,
        holdout=Holdout(test=0.0, validation=0.25),
        evaluation=Evaluation(every=1, part="validation"),
        on_divergence="warn",
    )


def fedpg() -> list[Part]:
    """The fixed noise beside FedAvg and VHL, and a generator at a tenth of the cost beside the full one."""
    training = Training(lr=0.1, batch_size=64, epochs=5, clip=5.0)
    splits = {"alpha 0.05": "dirichlet:alpha=0.05,clients=10,cap=false,min=1", "two-class": "two-class"}
    parts = [
        Part(name, experiment(f"sample:keep=4000+{split}", "simple-cnn", 20, training, 5), ["fedavg", "vhl", "fedpg"])
        for name, split in {**splits, "subset": "subset"}.items()
    ]
    cheap = "fedpg:source=generator"
    return [*parts, parts[2]._replace(methods=[cheap, f"{cheap},generate_every=1"])]


def fedmr() -> list[Part]:
    """The default and smaller limits beside a tuned FedAvg, on nets with and without batch norm and linear features."""
    training = Training(batch_size=32, epochs=2, schedule="cosine", clip=5.0)
    splits = {"dirichlet 0.3": "dirichlet:alpha=0.3,clients=5,min=10", "two": "pcdd:clients=5,classes=2"}
    rates = {
        "simple-cnn": (0.1, 0.2, 0.4),
        "cnn": (0.1, 0.2),
        "cnn4:width=16": (0.1, 0.2),
        "resnet8:width=8": (0.1, 0.3),
    }
    return [
        Part(
            f"{net}, {name}",
            experiment(f"sample:keep=2000+{split}", net, 15, training),
            ["fedavg", "fedmr", "fedmr:limit=0.5", "fedmr:limit=0.25"],
            rates[net],
        )
        for net in rates
        for name, split in splits.items()
    ]


def fedcd() -> list[Part]:
    """The default, other candidates and all terms off beside a tuned FedAvg, with and without clipped gradients."""
    training = Training(momentum=0.9, batch_size=64, epochs=3)
    off = "fedcd:mu=1,rho=0,gamma=0,lam=0,classifier=mean,clip=off"
    methods = ["fedavg", "fedcd", "fedcd:clip=off", off, "fedcd:rho=0,clip=off", "fedcd:preset=paper"]
    split = "sample:keep=4000+dirichlet:alpha={},clients=10,min=10"
    parts = [
        Part(f"beta {beta}", experiment(split.format(beta), "simple-cnn", 25, training), methods, (0.01, 0.03))
        for beta in (0.5, 0.1)
    ]
    # the larger rate is the better one for FedAvg, so a larger one still is tried, with the default too
    few = ["fedavg", "fedcd", "fedcd:clip=off", "fedcd:clip=1", off.replace("clip=off", "clip=5")]
    parts += [Part(f"{part.setting}, lr 0.1", part.experiment, few, (0.1,)) for part in parts]
    # the default clips gradients, so FedAvg does too
    clipped = replace(parts[2].experiment, training=replace(training, clip=5.0))
    return [*parts, Part("beta 0.5, lr 0.1, clip 5", clipped, ["fedavg"], (0.1,))]


def weighting() -> list[Part]:
    """FedDyn and FedDC with clients weighted by samples and all alike."""
    methods = [f"{name}{text}" for name in ("feddyn", "feddc") for text in ("", ":weighting=uniform")]
    split = "sample:keep=4000+dirichlet:alpha=0.3,clients=10,min=10"
    return [Part("mlp", experiment(split, "mlp", 20, Training(lr=0.1, epochs=2)), ["fedavg", *methods])]


STUDIES = {"fedpg": fedpg, "fedmr": fedmr, "fedcd": fedcd, "weighting": weighting}


def row(part: Part, method: str, seed: int, lr: float) -> dict[str, object]:
    """Carry out one run."""
    training = replace(part.experiment.training, lr=lr)
    outcome = execute(replace(part.experiment, method=method_of(method), seed=seed, training=training), None)
    clients = [record.metrics.clients for record in outcome.records if record.metrics is not None]
    curve = [100 * one.global_.weighted for one in clients if one is not None and one.global_ is not None]
    last, mean = f"{curve[-1]:.1f}", f"{statistics.mean(curve[-5:]):.1f}"
    values = (part.setting, method, seed, lr, last, mean, " ".join(f"{value:.0f}" for value in curve))
    return dict(zip(COLUMNS, values, strict=True))


def main(study: str, path: Path) -> None:
    done = list(csv.DictReader(path.open())) if path.exists() else []
    rates = {line["setting"]: float(line["lr"]) for line in done}
    known = {(line["setting"], line["method"], line["seed"]) for line in done}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for part in STUDIES[study]():
            lr = rates.get(part.setting) or chosen_rate(part)
            for seed in SEEDS:
                for method in part.methods:
                    if (part.setting, method, str(seed)) not in known:
                        writer.writerow(row(part, method, seed, lr))
                        file.flush()


def chosen_rate(part: Part) -> float:
    """FedAvg's learning rate in a setting."""
    if not part.rates:
        return part.experiment.training.lr
    with tempfile.TemporaryDirectory() as folder:
        return choose_rate(part.experiment, part.rates, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
