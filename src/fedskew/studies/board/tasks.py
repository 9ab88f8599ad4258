"""The tasks of the board: one TOML file each, in the folder tasks/.

title     what the task is, in a few words
why       why it is on the board
seeds     how many paired seeds every method is run with: 0, 1, ...
rates     the learning rates that are tried on validation data
seconds   what a run of FedAvg takes on one slow core, measured; for estimates only
[experiment]   settings of an experiment, all but the method, the seed and the learning rate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from fedskew.core.settings import UsageError, build, unknown
from fedskew.core.training import Count, Positive
from fedskew.evaluation.figures import check_goal
from fedskew.experiment.config import Experiment, from_dict, method_of, read_toml

HOME = Path(__file__).parent / "tasks"
ORDER = ("t6", "t1", "t2", "t3", "t0", "t5", "t4")  # of `board run`: the cheapest and most asked for first


@dataclass(frozen=True)
class TaskFile:
    """One task as its file says it; see the module's docstring."""

    title: str
    why: str
    seeds: Count
    rates: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    seconds: Positive
    goal: str = "global"  # key of the figure that rows are ordered by
    name: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)

    def base(self) -> Experiment:
        """The experiment with FedAvg, the first seed and the first rate."""
        return from_dict(self.experiment)

    def settings(self) -> dict[str, Any]:
        """All settings that the cells share: those of the experiment without method, seed and learning rate."""
        values = {k: v for k, v in self.base().as_dict().items() if k not in ("method", "seed")}
        return values | {"training": {k: v for k, v in values["training"].items() if k != "lr"}}

    def cell(self, method: str, rate: float, seed: int) -> Experiment:
        """The experiment of one cell: a method (with settings, as on the command line), its rate and a seed."""
        base = self.base()
        return replace(base, method=method_of(method), seed=seed, training=replace(base.training, lr=rate))


def names() -> list[str]:
    """The names of the tasks, in the order in which they are run."""
    found = [path.stem for path in sorted(HOME.glob("*.toml"))]
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def load_task(name: str) -> TaskFile:
    """A task by its name; a mistake in its file is a `UsageError`."""
    if name not in names():
        raise unknown("task of the board", name, names())
    values = read_toml(HOME / f"{name}.toml")
    settings = values.pop("experiment", {})
    task = replace(build(TaskFile, values, f"task {name}"), name=name, experiment=settings)
    for key in ("method", "seed"):
        if key in settings:
            raise UsageError(f"task {name} sets {key}: every method is run, with the seeds 0 to {task.seeds - 1}.")
    check_goal(task.goal)
    task.base()
    return task


def load_tasks(wanted: Sequence[str]) -> list[TaskFile]:
    """The tasks with these names, each once; all of them if there is none."""
    return [load_task(name) for name in dict.fromkeys(wanted or names())]
