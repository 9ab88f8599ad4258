"""The workloads on which speed and memory are measured, and the CPU time and memory of processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedskew.data.sources.loading import load


@dataclass(frozen=True)
class Workload:
    """A federated training task."""

    name: str
    net: str  # lenet | mcmahan
    clients: int
    cohort: int  # clients per round
    samples: int  # per client
    batch: int
    epochs: int = 1
    momentum: float = 0.0
    lr: float = 0.01
    rounds: int = 6  # per measurement
    method: str = "fedavg"  # fedavg | scaffold


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tiny", "lenet", clients=1000, cohort=50, samples=60, batch=10, rounds=4),
        Workload("silo", "lenet", clients=10, cohort=10, samples=2000, batch=64, epochs=2, momentum=0.9, rounds=1),
        Workload("mcmahan", "mcmahan", clients=20, cohort=8, samples=500, batch=128, rounds=1),
        Workload("scaffold", "lenet", clients=5000, cohort=250, samples=12, batch=12, rounds=1, method="scaffold"),
    )
}


def images(workload: Workload, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [n, 28, 28, 1], and labels for all clients: scikit-learn's digits, enlarged, with replacement.

    Real images, because the time depends on them: max pooling of noise mispredicts every branch.
    """
    digits = load("digits")
    small = torch.from_numpy(digits.x_train).permute(0, 3, 1, 2).float()
    large = torch.nn.functional.interpolate(small, (28, 28), mode="bilinear").permute(0, 2, 3, 1)
    chosen = np.random.default_rng(seed).integers(0, len(small), workload.clients * workload.samples)
    return large.to(torch.uint8).numpy()[chosen], digits.y_train[chosen]


def cohort(workload: Workload, round: int) -> list[int]:
    """The clients of a round, in order."""
    order = torch.randperm(workload.clients, generator=torch.Generator().manual_seed(round))
    return sorted(order[: workload.cohort].tolist())


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes so far, in seconds."""
    tick = os.sysconf("SC_CLK_TCK")
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / tick


def memory_mb(pids: list[int]) -> float:
    """Resident memory of these processes together in MB; shared pages count once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024
