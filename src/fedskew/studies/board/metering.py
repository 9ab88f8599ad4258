"""How far the board is: counts its runs, estimates the time left, and keeps both for `fedskew watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedskew.core.files import sha256
from fedskew.experiment.progress import ProgressWriter, Step, StudyProgress
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.board.tasks import TaskFile

NOTE = "lr: a learning rate, judged on validation data. seed: with the best of them, as the board counts it."


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
    before: int = 0  # runs that were done when the task began that is run now
    writer: ProgressWriter | None = None  # of that task, see `on`

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

    @property
    def pace(self) -> float:
        """How many times as long as FedAvg's the runs take; before the first run it assumes 2."""
        return self.spent / self.expected if self.expected else 2.0

    def seconds_left(self) -> float:
        """An estimate."""
        return max(0.0, self.left) * self.pace

    @contextmanager
    def on(self, task: TaskFile, folder: Path) -> Iterator[None]:
        """While the block goes on, keep how far a task is in its folder."""
        start = StudyProgress(
            kind="board",
            title=f"{task.name}: {task.title}",
            figure=task.goal,
            note=NOTE,
            mark=sha256(repr((task.settings(), task.rates, task.seeds)).encode())[:16],
            total=self.methods * self.runs_of(task),
        )
        self.before = self.done
        with ProgressWriter(folder, start) as self.writer:
            yield
        self.writer = None

    def tell(self, task: TaskFile, text: str) -> None:
        """Keep how far the task is."""
        if self.writer is not None:
            done, total = self.done - self.before, self.methods * self.runs_of(task)
            self.writer.tell(text, done, total, self.pace * task.seconds * (total - done))

    def add(self, step: Step) -> None:
        """Keep what a finished run came to."""
        if self.writer is not None:
            self.writer.add(step)

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

    def __exit__(self, error: object, *rest: object) -> None:
        if error is not None:
            return
        meter = self.meter
        meter.done += 1
        meter.left -= self.task.seconds
        if self.rounds:
            meter.spent += time.monotonic() - self.began
            meter.expected += self.task.seconds
            self._say(0.0, "done")
        else:
            meter.tell(self.task, self.text)

    def _say(self, part: float, text: str) -> None:
        meter, name = self.meter, f"{self.task.name} {self.text}"
        meter.say(meter.done + part, meter.total, meter.seconds_left(), name, text)
        meter.tell(self.task, f"{self.text}, {text}")
