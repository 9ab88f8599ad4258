"""Runs the board: for every method of a task three learning rates on validation data, then the paired seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew.experiment.config import method_of
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.methods import REGISTRY
from fedskew.studies.board.cells import Cell, Trial, cell_path, do_cell, do_trial, read_kept, trial_path
from fedskew.studies.board.tasks import TaskFile
from fedskew.studies.choice import best_rate, rate_trial
from fedskew.studies.ranking import BASELINE

FIRST = (BASELINE, "fedavgm", "finetune", "local", "central")  # what every other method is read beside


@dataclass(frozen=True)
class Tried:
    """One method on one task: its trials and its cells, as far as they are finished."""

    method: str
    trials: Mapping[float, Trial]  # by learning rate
    rate: float | None = None  # the one chosen; None: each of them failed, or not all are finished
    cells: Mapping[int, Cell] = field(default_factory=dict)  # by seed

    def whole(self, task: TaskFile) -> bool:
        """Whether nothing is left to run."""
        return len(self.trials) == len(task.rates) and (self.rate is None or len(self.cells) == task.seeds)


def all_methods() -> list[str]:
    """Every registered method, the controls that are read beside all others first."""
    return [*FIRST, *sorted(REGISTRY.keys() - set(FIRST))]


def chosen_rate(task: TaskFile, trials: Mapping[float, Trial]) -> float | None:
    """The rate with the best value on validation data; None if a trial is missing or all have failed."""
    found = {rate: trial.value for rate, trial in trials.items() if trial.value is not None}
    return best_rate(found) if found and len(trials) == len(task.rates) else None


def finished(task: TaskFile, method: str, folder: Path) -> Tried:
    """What is in the folder of a task for this method; nothing is run."""
    trials = {}
    for rate in task.rates:
        wanted = rate_trial(task.cell(method, rate, 0), rate)
        if (trial := read_kept(trial_path(folder, method, rate), Trial, wanted)) is not None:
            trials[rate] = trial
    best = chosen_rate(task, trials)
    cells = {}
    for seed in range(task.seeds) if best is not None else ():
        assert best is not None
        wanted = task.cell(method, best, seed)
        if (cell := read_kept(cell_path(folder, method, seed), Cell, wanted)) is not None:
            cells[seed] = cell
    return Tried(method, trials, best, cells)


def run_method(task: TaskFile, method: str, folder: Path, meter: Meter, **options: Any) -> Tried:
    """Run what is left of a method on a task, and read the rest.

    A method that cannot run on such data (`Trial.failed`) is not run with its seeds.
    """
    trials: dict[float, Trial] = {}
    for rate in task.rates:
        with meter.run(task, f"{task.name} {method} lr {rate:g}") as watch:
            path = trial_path(folder, method, rate)
            trials[rate] = do_trial(task.cell(method, rate, 0), rate, path, watch, **options)
    best, cells = chosen_rate(task, trials), {}
    for seed in range(task.seeds):
        with meter.run(task, f"{task.name} {method} seed {seed}") as watch:
            if best is not None:
                path = cell_path(folder, method, seed)
                cells[seed] = do_cell(task.cell(method, best, seed), path, watch, **options)
    return Tried(method, trials, best, cells)


@dataclass
class Meter:
    """Counts runs and estimates the time left.

    A run of a method that is still to come is expected to take what the mean of the finished runs took, in runs of
    FedAvg on their task (`TaskFile.seconds`), so that a task with larger runs is not underestimated.
    """

    tasks: Sequence[TaskFile]
    methods: int
    say: Callable[[float, int, float, str, str], None]  # (done, of, seconds left, which run, what it is at)
    done: int = 0
    spent: float = 0.0  # seconds, in runs that were run now
    expected: float = 0.0  # seconds these would have taken FedAvg
    left: float = field(init=False)  # seconds the runs that are left would take FedAvg

    def __post_init__(self) -> None:
        self.left = sum(self.methods * self.runs_of(task) * task.seconds for task in self.tasks)

    @staticmethod
    def runs_of(task: TaskFile) -> int:
        """How many runs a method has on a task."""
        return len(task.rates) + task.seeds

    @property
    def total(self) -> int:
        """How many runs there are in all."""
        return sum(self.methods * self.runs_of(task) for task in self.tasks)

    def seconds_left(self) -> float:
        """An estimate; before the first run it assumes that methods cost twice what FedAvg does."""
        return max(0.0, self.left) * (self.spent / self.expected if self.expected else 2.0)

    def run(self, task: TaskFile, text: str) -> _Metered:
        """A context in which one run is run or read; it gives what is called after each round."""
        return _Metered(self, task, text)


class _Metered:
    """One run that a `Meter` counts. A run that is only read does not count for the estimate."""

    def __init__(self, meter: Meter, task: TaskFile, text: str) -> None:
        self.meter, self.task, self.text = meter, task, text
        self.rounds = 0

    def __enter__(self) -> Callable[[Run, Record], None]:
        self.began = time.monotonic()
        return self._watch

    def _watch(self, run: Run, record: Record) -> None:
        self.rounds = record.number
        self._say(record.number / run.rounds, f"round {record.number}/{run.rounds}")

    def __exit__(self, *error: object) -> None:
        meter = self.meter
        meter.done += 1
        meter.left -= self.task.seconds
        if self.rounds:
            meter.spent += time.monotonic() - self.began
            meter.expected += self.task.seconds
            self._say(0.0, "done")

    def _say(self, part: float, text: str) -> None:
        self.meter.say(self.meter.done + part, self.meter.total, self.meter.seconds_left(), self.text, text)


def run_board(
    tasks: Sequence[TaskFile], methods: Sequence[str], out: Path, meter: Meter, **options: Any
) -> Iterator[tuple[TaskFile, Tried]]:
    """Run every method on every task, task by task; yields what each method came to on a task."""
    for text in methods:
        method_of(text)  # a mistake shows before the first run
    for task in tasks:
        for text in methods:
            yield task, run_method(task, text, out / task.name, meter, **options)
