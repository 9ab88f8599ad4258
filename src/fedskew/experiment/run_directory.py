"""The directory of a run: its files, and how they are read. Only run_writer.py writes them, during the run.

    settings.toml       the experiment
    records.jsonl       one record per round
    clients/            states of clients, in segments: a few large files (see federation/segments.py)
    clients.jsonl       the committed versions of client states in order, with checksums and places
    checkpoints/        the server's state after a round; a file's name ends in its SHA-256
    model.json          what one must know to use the model (see card.py)
    server.safetensors  model.safetensors  result.json     of a finished run
    privacy.jsonl       of a private run: its noisy sums (see federation/ledger.py)
    deployment.json     of a run between sites: their names (see deploy/server.py)
    split.json  client_accuracy.jsonl  failure.json     for those who look at a run (see live.py)

A run may be finished, interrupted, or still running; `read_run` reads each of them.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np
import torch

from fedskew import __version__
from fedskew.core.settings import UsageError, path_of
from fedskew.core.tensors import Payload
from fedskew.data.sources.formats import reading
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.result import Result
from fedskew.federation.protocol import Record, merge_late
from fedskew.federation.segments import Place
from fedskew.federation.store import Store, Version
from fedskew.federation.wire import decode

SETTINGS, RECORDS, RESULT, VERSIONS = "settings.toml", "records.jsonl", "result.json", "clients.jsonl"
SERVER, MODEL, CARD, DEPLOYMENT = "server.safetensors", "model.safetensors", "model.json", "deployment.json"


def versions() -> dict[str, str]:
    """The versions of the packages that the exact result of a run depends on."""
    return {
        "fedskew": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


class VersionLine(TypedDict):
    """A line of clients.jsonl, see `Version`."""

    client: int
    round: int
    sha256: str
    place: NotRequired[Place | None]


@dataclass(frozen=True)
class SavedRun:
    """The contents of a run's directory. The run may be finished, interrupted, or still running."""

    path: Path
    experiment: Experiment
    records: list[Record]
    result: Result | None  # None: not finished

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The experiment as plain values."""
        return self.experiment.as_dict()

    def server(self) -> Payload:
        """The server's final state, of a finished run."""
        return read_tensors(self.path / SERVER)

    def store(self) -> Store:
        """The clients' states after the last checkpoint."""
        store = Store(self.path / "clients")
        store.restore(parse_versions((self.path / VERSIONS).read_bytes()))
        return store


def is_run(path: Path) -> bool:
    """Whether the folder contains a run."""
    return (path / SETTINGS).exists()


def is_finished(path: Path) -> bool:
    """Whether the folder contains a finished run."""
    return (path / RESULT).exists()


def read_settings(path: Path) -> Experiment:
    """The experiment of the run in a folder."""
    if not is_run(path):
        raise UsageError(f"{path} holds no run: there is no {SETTINGS} in it.")
    return from_dict(read_toml(path / SETTINGS))


def read_run(path: Path | str, experiment: Experiment | None = None) -> SavedRun:
    """The run in a folder. A last record that was written only in part is left out.

    experiment: that of the run, if it is known already; None reads it from the settings.
    """
    path = path_of(path, "path")
    experiment, result = experiment or read_settings(path), path / RESULT
    try:
        records = read_records(path / RECORDS)
        return SavedRun(path, experiment, records, read_result(result) if result.exists() else None)
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read: {error}.") from None


def drop_states(path: Path) -> None:
    """Remove models and states from the directory of a run that is over; settings, records and result stay."""
    for folder in ("checkpoints", "clients"):
        shutil.rmtree(path / folder, ignore_errors=True)
    for name in (SERVER, MODEL, VERSIONS):
        (path / name).unlink(missing_ok=True)


def read_tensors(path: Path) -> Payload:
    """The payload in a file; UsageError if it is damaged."""
    with reading(path):  # a hostile header may raise anything
        return decode(path.read_bytes())


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs in these folders, at any depth; UsageError if one of them contains no run."""
    runs: dict[Path, Path] = {}
    for folder in folders:
        in_folder = sorted(path.parent for path in folder.rglob(SETTINGS))
        if not in_folder:
            raise UsageError(f"{folder} holds no run: there is no {SETTINGS} in it or below it.")
        runs |= {path.resolve(): path for path in in_folder}
    return list(runs.values())


def read_records(path: Path) -> list[Record]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")]
    return merge_late(msgspec.json.decode(line, type=Record) for line in complete)


def read_result(path: Path) -> Result:
    """The result in a file; OSError or ValueError if it cannot be read."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def parse_versions(lines: bytes) -> Iterable[Version]:
    # converted by type: a client and a round become the name of a file
    return (Version(**msgspec.json.decode(line, type=VersionLine)) for line in lines.splitlines())
