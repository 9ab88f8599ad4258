"""Accuracy against epsilon of client-level differential privacy, for four methods on one skewed split of 200 clients.

    python scripts/dp_study.py results/privacy/epsilon.csv          about half an hour on one core

digits (about 7 samples a client), all clients in each of 10 rounds. Runs that the file has already are not repeated.
"""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import fedskew
from fedskew.experiment.config import from_dict

ROUNDS, CLIP = 10, 0.5
METHODS = ("fedavg", "fedprox", "fedmr", "fedcrc:tau=0")
EPSILONS = (None, 8.0, 2.0, 32.0, 4.0)  # None: no clipping, no noise
SEEDS = (0, 1, 2)
COLUMNS = ("method", "epsilon", "seed", "noise", "accuracy", "loss")


def outcome(method: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Carry out one run."""
    experiment = from_dict(
        {
            "method": method,
            "split": "dirichlet:alpha=0.3,clients=200,min=2",
            "model": "mlp:hidden=32",
            "rounds": ROUNDS,
            "seed": seed,
            "training": {"lr": 0.1, "batch_size": 8, "epochs": 4},
            "holdout": {"test": 0.0},
            "evaluation": {"every": ROUNDS},
            "privacy": {} if epsilon is None else {"epsilon": epsilon, "clip": CLIP},
            "on_divergence": "warn",
        }
    )
    run = fedskew.run(experiment)
    plan = run.private_plan(run.assembled)
    list(run)
    assert run.result is not None
    metrics = run.result.metrics
    assert metrics is not None
    assert metrics.global_ is not None
    return {
        "method": method,
        "epsilon": epsilon or "none",
        "seed": seed,
        "noise": round(plan.noise, 4) if plan is not None else 0,
        "accuracy": round(metrics.global_.accuracy, 4),
        "loss": round(metrics.global_.loss or 0.0, 4),
    }


def main(path: Path) -> None:
    done = list(csv.DictReader(path.open())) if path.exists() else []
    known = {(row["method"], row["epsilon"], row["seed"]) for row in done}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for epsilon, seed, method in itertools.product(EPSILONS, SEEDS, METHODS):
            if (method, str(epsilon or "none"), str(seed)) not in known:
                writer.writerow(outcome(method, epsilon, seed))
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
