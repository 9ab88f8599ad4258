"""Runs the board: for every method of a task three learning rates on validation data, then the paired seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew.experiment.config import method_of
from fedskew.experiment.progress import Step
from fedskew.methods import REGISTRY
from fedskew.studies.board.cells import Cell, Trial, cell_path, do_cell, do_trial, read_kept, trial_path
from fedskew.studies.board.metering import Meter
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
        part = f"lr {rate:g}"
        with meter.run(task, f"{method} {part}") as watch:
            path = trial_path(folder, method, rate)
            trials[rate] = do_trial(task.cell(method, rate, 0), rate, path, watch, **options)
            meter.add(trial_step(method, part, trials[rate]))
    best, cells = chosen_rate(task, trials), {}
    for seed in range(task.seeds):
        part = f"seed {seed}"
        with meter.run(task, f"{method} {part}") as watch:
            if best is not None:
                path = cell_path(folder, method, seed)
                cells[seed] = do_cell(task.cell(method, best, seed), path, watch, **options)
                meter.add(cell_step(method, part, cells[seed], task.goal))
    return Tried(method, trials, best, cells)


def trial_step(method: str, part: str, trial: Trial) -> Step:
    """A trial as `fedskew watch` shows it."""
    return Step(method=method, part=part, value=trial.value, failed=trial.failed, trial=True)


def cell_step(method: str, part: str, cell: Cell, goal: str) -> Step:
    """A cell as `fedskew watch` shows it."""
    curve = [(point.round, v) for point in cell.curve if (v := point.figures.get(goal)) is not None]
    rounds, value = curve[-1] if curve else (0, None)
    return Step(method=method, part=part, value=value, failed=cell.failed, rounds=rounds, curve=curve)


def run_board(
    tasks: Sequence[TaskFile], methods: Sequence[str], out: Path, meter: Meter, **options: Any
) -> Iterator[tuple[TaskFile, Tried]]:
    """Run every method on every task, task by task; yields what each method came to on a task."""
    for text in methods:
        method_of(text)  # a mistake shows before the first run
    for task in tasks:
        with meter.on(task, out / task.name):
            for text in methods:
                yield task, run_method(task, text, out / task.name, meter, **options)
