"""Shows that memory hardly grows with the number of clients or the cohort: peak memory of all processes together.

python benchmarks/memory.py [CLIENTS ...] [--workers 2]

CLIENTS selects the cases with so many clients; none: all. "peak MB" is that of the rounds, all processes together,
shared pages once; "parent MB" the most the parent ever had, also while it made and shared the data.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ours import world_of
from workloads import Workload, cohort, memory_mb

from fedskew.core.method import Method
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.store import Store
from fedskew.methods import REGISTRY

BASE = Workload("", "lenet", clients=1000, cohort=50, samples=12, batch=12)
CASES: list[tuple[str, Workload, int]] = [  # method, workload, rounds
    ("scaffold", replace(BASE, clients=500, cohort=250), 4),
    ("scaffold", replace(BASE, clients=5000, cohort=250), 20),
    ("fedavg", replace(BASE, clients=1000, cohort=50), 20),
    ("fedavg", replace(BASE, clients=10000, cohort=50), 20),
    ("fedavg", replace(BASE, clients=1000, cohort=500), 4),
    ("fedavg", replace(BASE, clients=100_000, cohort=50), 20),
    ("fedavg", replace(BASE, clients=1_000_000, cohort=50, samples=4, batch=4), 20),
]


class Watch(threading.Thread):
    """A thread that measures the memory of this process and the workers every 0.1 s."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(daemon=True)
        self.simulation, self.peak, self.going = simulation, 0.0, True

    def run(self) -> None:
        while self.going:
            pool = self.simulation.pool
            pids = [os.getpid(), *([w.process.pid for w in pool.workers] if pool else [])]
            with contextlib.suppress(OSError):  # a process may have ended meanwhile
                self.peak = max(self.peak, memory_mb(pids))
            time.sleep(0.1)


def measure(method: Method, workload: Workload, rounds: int, workers: int) -> tuple[float, float, float, float]:
    """(peak MB, MB of client state on disk, seconds until the first round, seconds of the rounds)."""
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    world = world_of(workload, method)
    with Simulation(world, workers=workers, store=Store(folder / "clients", memory=64 << 20)) as simulation:
        del world  # its arrays are in shared memory now
        watch = Watch(simulation)
        watch.start()
        site = simulation.world.server_site
        started = time.perf_counter()
        for _ in run(method, simulation, site, rounds, lambda r: cohort(workload, r), evaluate=lambda r: False):
            pass
        watch.going = False
        watch.join()
    disk = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20
    shutil.rmtree(folder)
    return watch.peak, disk, started - began, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", type=int)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print("method    clients  cohort  rounds   data MB   peak MB  parent MB   state on disk MB    set-up s   rounds s")
    for name, workload, rounds in CASES:
        if given.clients and workload.clients not in given.clients:
            continue
        data = workload.clients * workload.samples * 784 / 2**20
        peak, disk, setup, seconds = measure(REGISTRY[name](), workload, rounds, given.workers)
        parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        what = f"{name:9s} {workload.clients:7d} {workload.cohort:7d} {rounds:7d}"
        print(f"{what} {data:9.0f} {peak:9.0f} {parent:10.0f} {disk:18.0f} {setup:11.1f} {seconds:10.1f}", flush=True)


if __name__ == "__main__":
    main()
