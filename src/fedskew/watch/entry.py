"""One line of the list: a run, or a study of many runs. What both have in common."""

from __future__ import annotations

import hashlib
import os
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec

from fedskew.experiment.live import FAILURE, LOCK, Failure, State, is_locked, read_small

TEXT = 300  # letters of a setting that are shown


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run or study in the list."""

    id: str  # names it in requests; hexadecimal
    name: str  # its path in the folder
    title: str  # the heading of its page
    method: str
    data: str  # its name; of a path the last part
    seed: str
    state: State
    why: str  # of a run that failed or ended early; "": nothing to say
    round: int  # how much is finished, in `unit`
    rounds: int  # of how much; 0: not known
    unit: str  # "": rounds of a run
    now: str  # what a study is at; "": nothing to say
    ends: float | None  # when it will be finished, in seconds since 1970; None: not known, or not running
    figure: str  # words of the leading figure; "": not evaluated yet
    value: str  # of the leading figure, with its unit
    written: float  # when the last record was written, in seconds since 1970


class Entry(ABC):
    """A folder that is watched. `row` reads what is new."""

    files: tuple[str, ...] = ()  # what a row is made of, beside the lock
    main: str = ""  # the file that is written as long as it goes on
    group = ""  # what runs that are drawn over each other have in common

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.place, self.name = path, str(path), readable(name)
        self.id = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        self.seen: tuple[Any, ...] = ()
        self.cached: Row | None = None

    def stamp(self, name: str) -> tuple[int, int] | None:
        """(size, time of the last change) of one of its files; None if it is no regular file."""
        try:
            found = os.lstat(f"{self.place}{os.sep}{name}")  # a Path of each file would take longer than looking at it
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str, kind: type[Any]) -> Any:
        """One of its small files; None if it is not there or cannot be read."""
        return read_small(self.path / name, kind) if self.stamp(name) else None

    def row(self) -> Row:
        """Its line in the list."""
        locked = self.stamp(LOCK) is not None and is_locked(self.path / LOCK, self.path / self.main)
        seen = (*map(self.stamp, (*self.files, FAILURE)), locked)
        if self.cached is None or seen != self.seen:
            self.seen, self.cached = seen, self._row(locked)
        return self.cached

    @abstractmethod
    def _row(self, locked: bool) -> Row:
        """The line, made anew. `locked`: whether a process holds the folder's lock."""

    def _unfinished(self, locked: bool) -> tuple[State, str]:
        """The state of what has no result yet, and why it failed."""
        if locked:
            return "running", ""
        failure = self.read(FAILURE, Failure)
        return ("failed", failure.why) if failure is not None else ("stopped", "")


def readable(text: str) -> str:
    """A text without what is no letter in Unicode, as the name of a folder may have."""
    return text.encode(errors="replace").decode()


def short(value: object) -> str:
    """A value as text of at most `TEXT` letters."""
    text = readable(str(value))
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"
