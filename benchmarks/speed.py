"""Compares the simulator with the bare loop: ratios of wall-clock time and CPU time per round, measured alternately.

python benchmarks/speed.py [tiny] [silo] [mcmahan] [scaffold] [--seconds 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bare import Bare
from ours import Ours
from workloads import WORKLOADS, Workload, cpu_seconds

GOALS = {"tiny": 0.65, "silo": 0.75, "mcmahan": 0.82, "scaffold": 0.80}  # ratios of wall-clock time


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


def ratio(ours: list[float], bare: list[float]) -> str:
    """The ratio of the medians, with the quartiles of the paired ratios."""
    pairs = sorted(a / b for a, b in zip(ours, bare, strict=True) if b)
    low, high = pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]
    return f"{statistics.median(ours) / statistics.median(bare):.2f} ({low:.2f} to {high:.2f})"


def compare(workload: Workload, seconds: float) -> None:
    """Measure a workload for so many seconds and print the ratios."""
    runners = {"bare": Bare(workload), "ours": Ours(workload), "ours, plain step": Ours(workload, fast=False)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    evals: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for runner in runners.values():
        measure(runner, workload.rounds)  # warm up
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times["bare"]) < 5:
        for name, runner in runners.items():
            times[name].append(measure(runner, workload.rounds))
            evals[name].append(measure(runner, 2, evaluate=True))
    bare = statistics.median(t for t, _ in times["bare"]) / workload.rounds
    print(f"\n{workload.name}: bare {1000 * bare:.0f} ms per round, {len(times['bare'])} alternating measurements")
    for name in list(runners)[1:]:
        wall = ratio([t for t, _ in times[name]], [t for t, _ in times["bare"]])
        cpu = ratio([c for _, c in times[name]], [c for _, c in times["bare"]])
        evaluation = ratio([t for t, _ in evals[name]], [t for t, _ in evals["bare"]])
        goal = f"   goal {GOALS[workload.name]:.2f}" if name == "ours" else "   goal 1.05"
        print(f"  {name:17s} time {wall}   CPU time {cpu}   evaluation {evaluation}{goal}")
    for runner in runners.values():
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement of each workload")
    options = parser.parse_args()
    print("ratio of medians to the bare loop (quartiles of the paired ratios); below 1 is faster than the bare loop")
    for name in options.names:
        compare(WORKLOADS[name], options.seconds)


if __name__ == "__main__":
    main()
