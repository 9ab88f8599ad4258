"""Whether training in bfloat16 ends where float32 does: runs of both, with the same seeds, as JSON lines.

    python benchmarks/precision.py [TASK] > runs.jsonl

Two tasks: digits with an MLP (seconds), and 3,000 images of Fashion-MNIST with a narrow ResNet with running batch-norm
statistics, to the end of a falling learning rate (about half an hour).
"""

from __future__ import annotations

import json
import logging
import sys
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
        "fmnist 3,000, resnet8 width 8": {"data": small_fashion(), "model": "resnet8:width=8", "rounds": 30},
    }
    for task, settings in tasks.items():
        if task.split()[0] not in (sys.argv[1:] or task.split()[0]):
            continue
        for method in METHODS:
            for seed in SEEDS:
                for precision in ("float32", "bf16"):
                    training = fedskew.Training(
                        lr=0.1 if "resnet" in task else 0.05, schedule="cosine" if "resnet" in task else "constant",
                        batch_size=32, epochs=2, precision=precision,
                    )  # fmt: skip
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
