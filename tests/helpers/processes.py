"""Simulations in worker processes: run one, and see what it left behind."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

from fedskew.cli.main import main
from fedskew.core.files import PREFIX
from fedskew.federation.loop import run
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.shared_memory import MEMORY
from fedskew.federation.simulate.simulation import Simulation


def train(simulation: Simulation, count: int = 3) -> list[Record]:
    """`count` rounds of all clients."""
    world = simulation.world
    return list(run(world.method, simulation, world.server_site, count, lambda round: list(range(world.population))))


def leftovers(pid: int | None = None) -> set[str]:
    """Shared folders that one process made and did not remove: this process, or the one given.

    Other runs on this machine have folders of their own: a folder's name holds the id of its maker.
    """
    places = [MEMORY, Path(tempfile.gettempdir())]
    mine = f"{PREFIX}{pid or os.getpid()}-*"
    return {str(path) for place in places if place.is_dir() for path in place.glob(mine)}


def quick_context() -> Any:
    """Processes that fork from a server which has imported torch: they start in a fraction of the time.

    Otherwise they are like spawned ones: clean, and given only what is pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedskew.experiment.run", "fedskew.cli.main"])
    return context


def command(words: list[str], log: str) -> None:
    """What a process is to run: the command line, all it prints in a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(words)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return "Z" not in stat.read_text().split()[2] if stat.exists() else True
