"""Compares the simulator with the bare loop: ratios of wall-clock time and CPU time per round, measured alternately.

python benchmarks/speed.py [tiny] [silo] [mcmahan] [scaffold] [--seconds 60]    # all: about six minutes when idle
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bare import Bare
from ours import Ours
from workloads import WORKLOADS, Workload, cpu_seconds

GOALS = {"tiny": 0.65, "silo": 0.75, "mcmahan": 0.82, "scaffold": 0.80}  # ratios of wall-clock time
PLAIN_GOAL = 1.05  # of step="plain", which computes what the bare loop does


def measure(runner, rounds: int, evaluate: bool = False) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """(wall-clock seconds, CPU seconds) of some rounds, or of as many evaluations."""
    pids = [os.getpid(), *runner.pids()]
    cpu, wall = cpu_seconds(pids), time.perf_counter()
    for number in range(rounds):
        if evaluate:
            runner.evaluate()
        else:
            runner.round(number)
    return time.perf_counter() - wall, cpu_seconds(pids) - cpu


def ratio(ours: list[float], bare: list[float]) -> float:
    """The ratio of the medians."""
    return statistics.median(ours) / statistics.median(bare)


def spread(ours: list[float], bare: list[float]) -> str:
    """The quartiles of the ratios of neighbouring measurements."""
    pairs = sorted(a / b for a, b in zip(ours, bare, strict=True) if b)
    return f"({pairs[len(pairs) // 4]:.2f} to {pairs[-1 - len(pairs) // 4]:.2f})"


def compare(workload: Workload, seconds: float) -> list[str]:
    """Measure a workload for so many seconds; returns one line for each way to run it."""
    runners = {
        "bare": Bare(workload),
        "fedskew": Ours(workload),
        "own nn.Module": Ours(workload, own=True),
        "plain step": Ours(workload, fast=False),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for runner in runners.values():
        measure(runner, workload.rounds)  # warm up
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times["bare"]) < 3:
        for name, runner in runners.items():
            times[name].append(measure(runner, workload.rounds))
    evals = {name: measure(runner, 4, evaluate=True)[0] for name, runner in runners.items()}
    for runner in runners.values():
        runner.close()
    wall = {name: [t for t, _ in found] for name, found in times.items()}
    cpu = {name: [c for _, c in found] for name, found in times.items()}
    lines = [
        f"{workload.name:9s} bare loop      {1000 * statistics.median(wall['bare']) / workload.rounds:6.0f} ms a round"
    ]
    for name in list(runners)[1:]:
        goal = PLAIN_GOAL if name == "plain step" else GOALS[workload.name]
        found = ratio(wall[name], wall["bare"])
        lines.append(
            f"{workload.name:9s} {name:14s} {found:5.2f} {spread(wall[name], wall['bare']):15s} "
            f"{goal:5.2f}  {'pass' if found <= goal else 'FAIL'}  {ratio(cpu[name], cpu['bare']):5.2f} "
            f"{spread(cpu[name], cpu['bare']):15s} {evals[name] / evals['bare']:6.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement of each workload")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start"
    )
    print(
        "Ratio of medians to the bare loop, with quartiles; below 1 is faster. CPU time counts if the machine is busy."
    )
    print("workload  way             time quartiles         goal        CPU time quartiles  evaluation")
    for name in options.names:
        print("\n".join(compare(WORKLOADS[name], options.seconds)), flush=True)


if __name__ == "__main__":
    main()
