"""What the board found: one JSON file a task, which ships with the package."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from fedskew.core.settings import UsageError


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one task, over the paired seeds. Accuracies and other shares are from 0 to 1."""

    method: str  # as on the command line, with settings other than the defaults: fedprox:mu=0.1
    lr: float  # the learning rate chosen on validation data
    seeds: int  # how many runs finished
    failed: int = 0  # how many diverged
    value: float | None  # the task's figure, mean over seeds of the last round
    last_five: float | None = None  # the same figure, mean of the last five evaluations
    over: float | None = None  # `value` less that of tuned FedAvg, paired by seed
    margin: float | None = None  # half the width of the 95 % interval of `over`; None with fewer than three seeds
    figures: dict[str, float | None] = {}  # other figures by key (see evaluation/figures.py), means over seeds
    costs: dict[str, float | None] = {}  # bytes, client_seconds, bytes and rounds to FedAvg's level
    digests: dict[int, str] = {}  # by seed, of the finished runs


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one task."""

    name: str  # t1
    title: str  # label skew, Dirichlet 0.1, 10 clients
    goal: str  # key of the figure that rows are ordered by
    skew: dict[str, float | None]  # as in a run's result (see experiment/skewness.py), of the first seed
    commit: str
    cpu: str
    rows: list[Row]
    schema: int = 1


def read_task(path: Path | Traversable) -> Task:
    """Read one task's file; anything else is a `UsageError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Task)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is not a task of the board: {error}") from error


def shipped() -> list[Task]:
    """The tasks that ship with the package, by name. A task whose cells were not run yet is not among them."""
    folder = resources.files("fedskew.studies.board") / "evidence"
    if not folder.is_dir():
        return []
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return [read_task(f) for f in files]
