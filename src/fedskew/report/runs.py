"""The runs a report is about: found in folders, and grouped by settings, method and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import Figure
from fedskew.evaluation.metrics import Metrics
from fedskew.experiment.given import method_text
from fedskew.experiment.run_directory import SavedRun, find_runs, read_run
from fedskew.studies.ranking import Standing, baseline_of, common_figure, rank

MAY_DIFFER = ("method", "seed")  # settings that may differ between the runs of one group


@dataclass(frozen=True)
class Group:
    """Runs that differ only in method and seed, by method."""

    methods: dict[str, list[SavedRun]]  # `method_text` -> its runs, one per seed
    goal: str | None = None  # the figure that methods are ordered by, see `common_figure`

    @property
    def first(self) -> SavedRun:
        """The first run of the first method; its settings are the group's."""
        return next(iter(self.methods.values()))[0]

    @property
    def title(self) -> str:
        """Data set and split."""
        settings = self.first.settings
        return f"{settings['data']}, {settings['split']}"

    @cached_property
    def finished(self) -> dict[str, list[SavedRun]]:
        """The finished runs by method; methods without one are left out."""
        return {name: done for name, runs in self.methods.items() if (done := [run for run in runs if run.result])}

    @cached_property
    def baseline(self) -> str | None:
        """The method that others are compared with; None if it is not among them."""
        return baseline_of(self.methods)

    @cached_property
    def figure(self) -> Figure:
        """The figure that methods are ordered by."""
        metrics = {name: [m for run in runs if (m := last_metrics(run))] for name, runs in self.finished.items()}
        return common_figure(metrics, self.baseline, self.goal)

    @cached_property
    def standings(self) -> list[Standing]:
        """The methods, best first."""
        values: dict[str, dict[int, float]] = {name: {} for name in self.methods}
        for name, runs in self.finished.items():
            for run in runs:
                if (value := self.figure.read(run.result)) is not None:
                    values[name][run.experiment.seed] = value
        return rank(values, self.figure, self.baseline)


def last_metrics(run: SavedRun) -> Metrics | None:
    """The last evaluation of a finished run; None if there is none."""
    return run.result.metrics if run.result is not None else None


def find(folders: Sequence[Path]) -> list[SavedRun]:
    """Every run in these folders, at any depth, that has finished a round. Finding none is a `UsageError`."""
    started = [run for run in map(read_run, find_runs(folders)) if run.records]
    if not started:
        raise UsageError(f"{folders[0]} holds no round yet: nothing to report.")
    return started


def grouped(runs: Sequence[SavedRun], goal: str | None = None) -> list[Group]:
    """Runs by settings; in each group the methods are in the order of `Group.standings`.

    Two runs of the same method, settings and seed are the same run: it counts once.
    """
    by_setting: dict[str, dict[str, dict[int, SavedRun]]] = {}
    for run in sorted(runs, key=lambda r: (r.experiment.method_name != "fedavg", r.experiment.seed, r.result is None)):
        setting = json.dumps({key: value for key, value in run.settings.items() if key not in MAY_DIFFER})
        methods = by_setting.setdefault(setting, {})
        methods.setdefault(method_text(run.experiment.method), {}).setdefault(run.experiment.seed, run)
    groups = [Group({name: list(of.values()) for name, of in methods.items()}, goal) for methods in by_setting.values()]
    return [Group({s.method: group.methods[s.method] for s in group.standings}, goal) for group in groups]
