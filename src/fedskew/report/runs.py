"""Runs as a report reads them: found under folders, and grouped into settings, methods and seeds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.evaluation.figures import FIGURES, figure
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.federation.store import Entry, Store
from fedskew.federation.wire import decode
from fedskew.methods import REGISTRY

BESIDE = ("method", "seed")  # what may differ between the runs of one setting


@dataclass(frozen=True)
class Kept:
    """One run's directory, read."""

    path: Path
    experiment: Experiment
    records: list[dict[str, Any]]
    result: dict[str, Any]  # {}: it was not finished

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.experiment.as_dict()

    def figure(self, word: str) -> float | None:
        return figure(self.result, FIGURES[word]) if self.result else None

    def server(self) -> Payload:
        return decode((self.path / "server.safetensors").read_bytes())

    def store(self) -> Store:
        """The clients' states as the run left them."""
        store = Store(self.path / "clients")
        lines = (self.path / "clients.jsonl").read_text().splitlines()
        store.restore(Entry(**json.loads(line)) for line in lines)
        return store


@dataclass(frozen=True)
class Group:
    """Runs that differ in method and seed alone: method -> its runs, a seed each."""

    methods: dict[str, list[Kept]]

    @property
    def first(self) -> Kept:
        return next(iter(self.methods.values()))[0]

    @property
    def title(self) -> str:
        settings = self.first.settings
        return f"{settings['data']}, {settings['split']}"


def find(folders: Sequence[Path]) -> list[Kept]:
    """Every run in these folders, at any depth."""
    runs = []
    for folder in folders:
        here = sorted(folder.rglob("settings.toml"))
        if not here:
            raise UsageError(f"{folder} holds no run: there is no settings.toml in it or below it.")
        runs += [read(path.parent) for path in here]
    begun = {run.path.resolve(): run for run in runs if run.records}
    if not begun:
        raise UsageError(f"{folders[0]} holds no round yet: nothing to report.")
    return list(begun.values())


def read(path: Path) -> Kept:
    records, result = path / "records.jsonl", path / "result.json"
    lines = records.read_text().splitlines() if records.exists() else []
    try:
        return Kept(
            path,
            from_dict(read_toml(path / "settings.toml")),
            [json.loads(line) for line in lines],
            json.loads(result.read_text()) if result.exists() else {},
        )
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read: {error}.") from None


def grouped(runs: Sequence[Kept]) -> list[Group]:
    """Settings in the order they were found; in each FedAvg first, then the others."""
    by_setting: dict[str, dict[str, list[Kept]]] = {}
    for run in sorted(runs, key=lambda r: (r.experiment.method_name != "fedavg", r.experiment.seed)):
        setting = json.dumps({key: value for key, value in run.settings.items() if key not in BESIDE})
        by_setting.setdefault(setting, {}).setdefault(method_text(run.experiment.method), []).append(run)
    return [Group(methods) for methods in by_setting.values()]


def method_text(method: Method) -> str:
    """`fedprox:mu=0.5`: a method's name with the settings that are not its defaults."""
    name = next((known for known, kind in REGISTRY.items() if kind is type(method)), type(method).__name__)
    fields = {
        f.name: getattr(method, f.name) for f in dataclasses.fields(method) if getattr(method, f.name) != f.default
    }
    return name + (":" + ",".join(f"{key}={value}" for key, value in fields.items()) if fields else "")
