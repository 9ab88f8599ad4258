"""How far a study of many runs is: progress.json in its folder. `fedskew watch` reads it, nothing else does.

A task of the board keeps its runs in memory, and a race of `advise` is more than its runs. So both say here which run
they are at, how long the rest will take, and what the finished runs came to. The file is small, written at most once
a second and not forced to disk; a study never fails because it cannot be written. The folder is locked meanwhile: a
viewer sees by the lock whether the study is going on.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import filelock
import msgspec

from fedskew.core.files import write_atomically
from fedskew.experiment.live import LOCK, clear_failure, read_small, write_failure
from fedskew.experiment.run_writer import PROBED

PROGRESS = "progress.json"
SPACING = 1.0  # seconds between two writes


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished run of a study."""

    method: str  # in words, with what a study chooses for it
    part: str  # which of its runs: "seed 3"
    value: float | None  # the study's figure; None: it failed
    failed: str = ""
    trial: bool = False  # whether it only served to choose a setting
    rounds: int = 0
    curve: list[tuple[int, float]] = []  # (round from 1, the figure)


class StudyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a study is."""

    kind: Literal["board", "advise"]
    title: str
    figure: str  # key of the figure that `Step.value` is, see evaluation/figures.py
    note: str = ""  # what a reader of the values must know
    mark: str = ""  # of the settings: steps of other settings are not kept
    unit: str = "runs"  # what `done` and `total` count
    done: int = 0
    total: int = 0
    now: str = ""  # what is going on
    ends: float | None = None  # when it is expected to end, in seconds since 1970
    finished: bool = False
    steps: list[Step] = []


@dataclass
class ProgressWriter:
    """Writes progress.json of the study in `folder` while a `with` block goes on.

    Steps that an earlier call left there are kept if they have the same mark. If another process works in the folder,
    that one writes, and this one does not.
    """

    folder: Path
    start: StudyProgress
    steps: dict[tuple[str, str], Step] = field(default_factory=dict)  # by method and part
    written: float = float("-inf")  # when, by the monotonic clock

    def __post_init__(self) -> None:
        self.lock = filelock.FileLock(self.folder / LOCK)
        self.last = self.start

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):  # a lock that is held is one of these
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=PROBED)
            clear_failure(self.folder)
            before = read_small(self.folder / PROGRESS, StudyProgress)
            if before is not None and before.mark == self.start.mark:
                self.steps = {(step.method, step.part): step for step in before.steps}
        self._write(self.start)
        return self

    def tell(self, now: str, done: int, total: int, seconds: float) -> None:
        """Say what is going on, how much is done, and the seconds that are about left."""
        self.last = msgspec.structs.replace(
            self.last, now=now, done=done, total=total, ends=round(time.time() + seconds, 1)
        )
        if time.monotonic() - self.written >= SPACING:
            self._write(self.last)

    def add(self, step: Step) -> None:
        """Add a finished run. The next `tell` writes it."""
        curve = [(round, value) for round, value in step.curve if math.isfinite(value)]
        self.steps[step.method, step.part] = msgspec.structs.replace(step, curve=curve)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        over = msgspec.structs.replace(self.last, now="", ends=None, finished=error is None)
        self._write(over if error else msgspec.structs.replace(over, done=over.total))
        if self.lock.is_locked:
            if error is not None:
                write_failure(self.folder, error)
            self.lock.release()

    def _write(self, progress: StudyProgress) -> None:
        if self.lock.is_locked:
            whole = msgspec.structs.replace(progress, steps=list(self.steps.values()))
            with contextlib.suppress(OSError):
                write_atomically(self.folder / PROGRESS, msgspec.json.encode(whole), durable=False)
            self.written = time.monotonic()
