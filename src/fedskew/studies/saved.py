"""Reads a run's directory: settings, records, result, and the final states of server and clients."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.federation.store import Entry, Store
from fedskew.federation.wire import decode


@dataclass(frozen=True)
class SavedRun:
    """What a run wrote to its directory, finished or not."""

    path: Path
    experiment: Experiment
    records: list[dict[str, Any]]  # one per finished round
    result: dict[str, Any]  # the final figures; {} if the run did not finish

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The experiment as plain values, as in its TOML file."""
        return self.experiment.as_dict()

    def server(self) -> Payload:
        """The server's final state. Only a finished run has one."""
        return decode((self.path / "server.safetensors").read_bytes())

    def store(self) -> Store:
        """The clients' states as the run left them."""
        store = Store(self.path / "clients")
        lines = (self.path / "clients.jsonl").read_text().splitlines()
        store.restore(Entry(**json.loads(line)) for line in lines)
        return store


def is_finished(path: Path) -> bool:
    """Whether the directory holds a run with its final figures."""
    return (path / "result.json").exists()


def read_experiment(path: Path) -> Experiment:
    """The experiment of the run in this directory."""
    return from_dict(read_toml(path / "settings.toml"))


def read_run(path: Path) -> SavedRun:
    """The run in a directory that has a settings.toml. Raises `UsageError` if a file in it cannot be read."""
    records = path / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    experiment = read_experiment(path)
    try:
        result = json.loads((path / "result.json").read_text()) if is_finished(path) else {}
        return SavedRun(path, experiment, [json.loads(line) for line in lines], result)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
