"""Whether training in bfloat16 ends where float32 does: small runs of both, with the same seeds, as JSON lines.

    python benchmarks/precision.py > runs.jsonl

Two tasks that take seconds: digits with an MLP, and 3,000 images of Fashion-MNIST with a narrow net with batch norm.
They can show a fault, not that long runs of large nets are level.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import torch

import fedskew
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load

METHODS = ("fedavg", "scaffold", "fedmr", "fedcd")
SEEDS = (1, 2, 3)


def small_fashion() -> DataSet:
    """3,000 training images and 1,000 test images of Fashion-MNIST."""
    data = load("fmnist")
    return replace(
        data,
        x_train=data.x_train[:3000],
        y_train=data.y_train[:3000],
        x_test=data.x_test[:1000],
        y_test=data.y_test[:1000],
    )


def main() -> None:
    """Run and print everything."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    tasks = {
        "digits, mlp": {"data": "digits", "model": "mlp", "rounds": 8},
        "fmnist 3,000, cnn4 width 8": {"data": small_fashion(), "model": "cnn4:width=8,track=true", "rounds": 10},
    }
    for task, settings in tasks.items():
        for method in METHODS:
            for seed in SEEDS:
                for precision in ("float32", "bf16"):
                    training = fedskew.Training(lr=0.05, batch_size=32, epochs=2, precision=precision)
                    experiment = fedskew.Experiment(
                        method, split="dirichlet:alpha=0.3,clients=5", seed=seed, training=training,
                        evaluation=fedskew.Evaluation(every=settings["rounds"]), **settings,
                    )  # fmt: skip
                    began = time.process_time()
                    *_, last = fedskew.run(experiment)
                    row = {"task": task, "method": method, "seed": seed, "precision": precision}
                    metrics = last.metrics
                    row |= {"accuracy": metrics.global_.accuracy, "loss": metrics.global_.loss}
                    print(json.dumps(row | {"cpu_seconds": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
