"""Small boards for tests: a task on the digits that runs in seconds, and runs that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedskew.studies.board.cells import KEPT, Cell, Point, Trial
from fedskew.studies.board.evidence import Task
from fedskew.studies.board.running import Tried
from fedskew.studies.board.statistics import make_task
from fedskew.studies.board.tasks import TaskFile

TINY = """
title = "digits, five clients"
why = "A task for tests."
seeds = 2
rates = [0.01, 0.1]
seconds = 0.2
[experiment]
data = "digits"
split = "sample:keep=300+dirichlet:alpha=0.5,clients=3,min=10"
model = "mlp:hidden=16"
rounds = 4
[experiment.evaluation]
every = 1
"""

SMALL = TaskFile(title="made up", why="for tests", seeds=3, rates=(0.1,), seconds=1.0, name="t9")
FLAT = (0.5, 0.6, 0.6, 0.6)  # a curve that has converged


def write_tiny(folder: Path) -> Path:
    """A folder of tasks with one: tiny."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.toml").write_text(TINY)
    return folder


def made_cell(curve: Sequence[float] = FLAT, own: Sequence[float] = (0.5, 0.7), failed: str = "") -> Cell:
    """A run with these accuracies of the global model; each round costs 100 bytes and 2 seconds."""
    if failed:
        return Cell(mark="", failed=failed)
    points = [
        Point(
            round=i + 1,
            figures=dict.fromkeys(KEPT) | {"global": value, "personal": sum(own) / len(own)},
            bytes=100 * (i + 1),
            seconds=2.0 * (i + 1),
        )
        for i, value in enumerate(curve)
    ]
    return Cell(
        mark="",
        digest="d" * 64,
        curve=points,
        own={str(client): value for client, value in enumerate(own)},
        costs={"bytes": 100.0 * len(curve), "client_seconds": 2.0 * len(curve), "server_seconds": 0.0},
        classes=10,
        commit="c",
        cpu="p",
    )


def made_method(method: str, *cells: Cell, rate: float = 0.1) -> Tried:
    """A method whose seeds 0, 1, ... came to these runs."""
    trial = Trial(mark="", value=0.5)
    return Tried(method, {0.1: trial}, rate, dict(enumerate(cells)))


def made_task(name: str = "t9", lead: float = 0.05, curve: Sequence[float] = FLAT) -> Task:
    """A task on which fedprox ends ahead of fedavg by `lead`, and other methods a little beside it."""
    task = TaskFile(title="made up", why="for tests", seeds=3, rates=(0.1,), seconds=1.0, name=name)
    noise = (-0.01, 0.0, 0.01)

    def method(name: str, ahead: float, spread: float = 1.0) -> Tried:
        last = [curve[-1] + ahead + spread * n for n in noise]
        return made_method(name, *(made_cell((*curve[:-1], value), (value, value - 0.1)) for value in last))

    tried = [method("fedavg", 0.0), method("fedprox", lead, 1.1), method("ratioloss", 0.02), method("fedgen", -0.03)]
    tried += [method("scaffold", 0.0, -3.0), method("local", -0.2)]
    return make_task(task, tried, [each.method for each in tried])
