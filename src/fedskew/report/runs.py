"""The runs a report is about: found in folders, and grouped by settings, method and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.experiment.given import method_text
from fedskew.experiment.run_directory import SavedRun, find_runs, read_run

MAY_DIFFER = ("method", "seed")  # settings that may differ between the runs of one group


@dataclass(frozen=True)
class Group:
    """Runs that differ only in method and seed, by method."""

    methods: dict[str, list[SavedRun]]  # `method_text` -> its runs, one per seed

    @property
    def first(self) -> SavedRun:
        """The first run of the first method; its settings are the group's."""
        return next(iter(self.methods.values()))[0]

    @property
    def title(self) -> str:
        """Data set and split."""
        settings = self.first.settings
        return f"{settings['data']}, {settings['split']}"


def find(folders: Sequence[Path]) -> list[SavedRun]:
    """Every run in these folders, at any depth, that has finished a round. Finding none is a `UsageError`."""
    started = [run for run in map(read_run, find_runs(folders)) if run.records]
    if not started:
        raise UsageError(f"{folders[0]} holds no round yet: nothing to report.")
    return started


def grouped(runs: Sequence[SavedRun]) -> list[Group]:
    """Runs by settings. In each group FedAvg comes first, then the other methods in the order they were found."""
    by_setting: dict[str, dict[str, list[SavedRun]]] = {}
    for run in sorted(runs, key=lambda r: (r.experiment.method_name != "fedavg", r.experiment.seed)):
        setting = json.dumps({key: value for key, value in run.settings.items() if key not in MAY_DIFFER})
        by_setting.setdefault(setting, {}).setdefault(method_text(run.experiment.method), []).append(run)
    return [Group(methods) for methods in by_setting.values()]
