"""One run of the board: carried out in memory, then kept as one small JSON file.

A file's name is that of its method and seed; inside is a mark of the settings, so a result of other settings is never
used. A run that is interrupted begins again: it takes seconds, or a few minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.evaluation.figures import FIGURES
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.choice import rate_trial, trial_value
from fedskew.studies.execution import Outcome, execute, file_name
from fedskew.studies.provenance import this_commit, this_cpu

# what is kept of every evaluation
KEPT = ("global", "balanced", "f1", "tail", "clients", "clients_worst", "personal", "worst", "new_global", "new")

CRASHED = "stopped by an error in the code:"  # how the reason begins then

log = logging.getLogger("fedskew")

Watch = Callable[[Run, Record], None]  # called after each round


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation, and what was spent until then."""

    round: int  # counted from 1
    figures: dict[str, float | None]  # by key, see `KEPT`
    bytes: int  # up and down
    seconds: float  # of clients and server together, without evaluation


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A method on a task with one seed."""

    mark: str  # of the settings
    failed: str = ""  # why there are no final figures: it diverged, or cannot run on such a task
    digest: str = ""  # SHA-256 of the server's final state and of every evaluation
    curve: list[Point] = []
    own: dict[str, float] = {}  # accuracy of each client's own model on its test part, by client
    skew: dict[str, float | None] = {}
    costs: dict[str, float] = {}  # bytes, client_seconds, server_seconds
    classes: int = 0
    commit: str = ""
    cpu: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A method on a task with one learning rate, on the validation data of a seed that is not on the board."""

    mark: str
    value: float | None  # of the validation data; None: the run diverged, or the method cannot run
    failed: str = ""


def mark(experiment: Experiment) -> str:
    """A text that differs between experiments with different settings."""
    return sha256(experiment.to_toml().encode())[:16]


def cell_path(folder: Path, method: str, seed: int) -> Path:
    """Where a cell is kept, in the folder of its task."""
    return folder / file_name(method) / f"seed{seed}.json"


def trial_path(folder: Path, method: str, rate: float) -> Path:
    """Where a trial is kept, in the folder of its task."""
    return folder / file_name(method) / f"rate{rate:g}.json"


def do_cell(experiment: Experiment, path: Path | None, watch: Watch | None = None, **options: Any) -> Cell:
    """The cell of an experiment: read from its file, or run and written there. None writes nothing.

    `options` say how to run (see `Run`).
    """
    if path is not None and (found := read_kept(path, Cell, experiment)) is not None:
        return found
    outcome = outcome_of(experiment, watch, **options)
    cell = Cell(mark=mark(experiment), commit=this_commit(), cpu=this_cpu(), **_contents(outcome))
    _keep(cell, path)
    return cell


def do_trial(
    experiment: Experiment, rate: float, path: Path | None, watch: Watch | None = None, **options: Any
) -> Trial:
    """The trial of a learning rate: read from its file, or run and written there. No test sample is looked at."""
    tried = rate_trial(experiment, rate)
    if path is not None and (found := read_kept(path, Trial, tried)) is not None:
        return found
    outcome = outcome_of(tried, watch, **options)
    trial = Trial(mark=mark(tried), value=trial_value(outcome, None), failed=outcome.failed)
    _keep(trial, path)
    return trial


def outcome_of(experiment: Experiment, watch: Watch | None = None, **options: Any) -> Outcome:
    """Run an experiment in memory. A method that cannot run on such data has failed, with the reason.

    So has one with an error in its code: a board of hours must not stop for it. It is run again the next time.
    """
    data = named_data(str(experiment.data), options.get("data_dir"))
    try:
        return execute(replace(experiment, data=data), None, watch, **options)
    except UsageError as error:
        return Outcome(None, [], failed=f"cannot run here: {error}")
    except Exception as error:
        log.exception("%s with seed %d", experiment.method_name, experiment.seed)
        return Outcome(None, [], failed=f"{CRASHED} {type(error).__name__}: {error}")


@lru_cache(maxsize=2)
def named_data(name: str, folder: Path | None) -> DataSet:
    """A data set under the name that a task gives it, which is what its settings say. Kept for the next run."""
    return replace(load(name, folder), name=name)


def _contents(outcome: Outcome) -> dict[str, Any]:
    """The fields of a cell that come from its run."""
    result = outcome.result
    if outcome.failed or result is None:
        return {"failed": outcome.failed or "no round was finished"}
    return {
        "digest": run_digest(outcome),
        "curve": curve(outcome.records),
        "own": {client: row.personal.accuracy for client, row in result.clients.items()},
        "skew": result.skew,
        "costs": {
            "bytes": float(result.bytes_up + result.bytes_down),
            "client_seconds": result.client_seconds,
            "server_seconds": result.server_seconds,
        },
        "classes": result.metrics.classes if result.metrics is not None else 0,
    }


def run_digest(outcome: Outcome) -> str:
    """SHA-256 of the server's final state and every evaluation: methods without a server's model have a digest, too."""
    assert outcome.result is not None
    evaluations = [msgspec.to_builtins(record.metrics) for record in outcome.records if record.metrics is not None]
    return sha256(msgspec.json.encode([outcome.result.digest, evaluations]))


def curve(records: list[Record]) -> list[Point]:
    """The evaluations of a run."""
    points, size, seconds = [], 0, 0.0
    for record in records:
        size += sum(record.bytes_up.values()) + sum(record.bytes_down.values())
        seconds += record.client_seconds + record.server_seconds
        if record.metrics is not None:
            figures = {key: FIGURES[key].of(record.metrics) for key in KEPT}
            points.append(Point(round=record.number, figures=figures, bytes=size, seconds=seconds))
    return points


Kept = TypeVar("Kept", Cell, Trial)


def read_kept(path: Path, kind: type[Kept], experiment: Experiment) -> Kept | None:
    """What a file holds, if it is of these settings; None if there is no such file, or it is broken."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.mark == mark(experiment) else None


def _keep(made: Cell | Trial, path: Path | None) -> None:
    if path is None or made.failed.startswith(CRASHED):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(made))
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
