"""What the board found: one JSON file a task, which ships with the package."""

from __future__ import annotations

import math
import statistics
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one task, over the paired seeds. Accuracies and other shares are from 0 to 1."""

    method: str  # as on the command line, with settings other than the defaults: fedprox:mu=0.1
    lr: float  # the learning rate chosen on validation data; 0: every rate failed
    seeds: int  # how many runs finished
    failed: int = 0  # how many diverged
    value: float | None  # the task's figure, mean over seeds of the last round
    last_five: float | None = None  # the same figure, mean of the last five evaluations
    over: float | None = None  # `value` less that of tuned FedAvg, paired by seed
    margin: float | None = None  # half the width of the 95 % interval of `over`; None with fewer than three seeds
    figures: dict[str, float | None] = {}  # other figures by key (see evaluation/figures.py), means over seeds
    costs: dict[str, float | None] = {}  # bytes, client_seconds, bytes and rounds to FedAvg's level
    digests: dict[int, str] = {}  # by seed, of the finished runs
    std: float | None = None  # of `value` over seeds
    values: dict[int, float] = {}  # what `value` is the mean of, by seed
    # against FedAvg: "win" or "loss" if the interval of `over` leaves out 0, else "tie"; "": not compared
    outcome: Literal["win", "tie", "loss", ""] = ""
    tied: bool = False  # whether it is the best, or cannot be told apart from the best
    own_over: float | None = None  # mean accuracy of clients' own models less that of FedAvg's, paired by seed
    own_margin: float | None = None  # half the width of its 95 % interval over seeds
    # 95 % interval of `own_over` over pairs of a seed and a client, by bootstrap; None without two pairs
    own_low: float | None = None
    own_high: float | None = None
    rates: dict[str, float | None] = {}  # what each learning rate came to on validation data; None: it failed
    note: str = ""  # why runs failed
    public: bool = False  # needs public data on the server
    sums_only: bool = True  # the server needs only sums over clients
    state: bool = False  # clients keep tensors between rounds
    control: bool = False  # no federation: training alone, or on the data of all


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """FedAvg's evaluations on a task: the task's figure, by seed and as their mean."""

    rounds: list[int] = []  # counted from 1
    mean: list[float] = []
    seeds: dict[int, list[float]] = {}


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
    why: str = ""  # why the task is on the board
    seeds: int = 0  # paired seeds that each method is to have
    rates: list[float] = []  # learning rates that each method chooses from
    settings: dict[str, Any] = {}  # of the experiment, without method, seed and learning rate
    versions: dict[str, str] = {}  # of packages that results depend on
    missing: list[str] = []  # methods that are not finished; empty: the task is whole
    unsettled: str = ""  # why FedAvg has not converged; then no method is ranked. "": it has
    curve: Curve = Curve()
    seal: str = ""  # SHA-256 of all the rest: a file that was changed by hand is noticed

    @property
    def ranked(self) -> bool:
        """Whether methods may be ordered: FedAvg has converged."""
        return not self.unsettled


def seal_of(task: Task) -> str:
    """The checksum of everything in a task but its seal."""
    as_read = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(task, seal="")), type=Task)
    plain = msgspec.to_builtins(as_read, str_keys=True)
    return sha256(msgspec.json.encode(plain, order="sorted"))


def write_task(task: Task, folder: Path) -> Path:
    """Write <folder>/<name>.json with its seal; the file's path."""
    sealed = msgspec.structs.replace(task, seal=seal_of(task))
    path = folder / f"{task.name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    return path


def read_task(path: Path | Traversable) -> Task:
    """Read one task's file; anything else, also a file that was changed after it was written, is a `UsageError`."""
    try:
        task = msgspec.json.decode(path.read_bytes(), type=Task)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a task of the board: {error}") from error
    if task.seal and task.seal != seal_of(task):
        raise UsageError(f"{path} was changed after `fedskew board run` wrote it: its contents do not match its seal.")
    for row in task.rows:
        if row.values and (row.value is None or not math.isclose(row.value, statistics.mean(row.values.values()))):
            raise UsageError(f"{path} is not a task of the board: {row.method} is not the mean of its seeds.")
    return task


def read_tasks(folder: Path | Traversable) -> list[Task]:
    """The tasks in a folder, by name; empty if there is none."""
    if not folder.is_dir():
        return []
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return [read_task(f) for f in files]


def shipped() -> list[Task]:
    """The tasks that ship with the package, by name. A task whose cells were not run yet is not among them."""
    return read_tasks(resources.files("fedskew.studies.board") / "evidence")
