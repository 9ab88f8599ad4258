"""The runs under one folder: which there are, their state, and what their records say.

Everything is read from regular files in folders that are really there: symbolic links are not followed, so nothing
outside the folder is read whatever is in it. A run is found by its id in the list of runs, never by a path that a
browser sent.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import leading_figure
from fedskew.experiment.given import method_from, method_table, method_text
from fedskew.experiment.live import FAILURE, LOCK, Failure, State, is_locked, last_records, read_small, seconds_left
from fedskew.experiment.run_directory import RECORDS, RESULT, SETTINGS
from fedskew.methods import REGISTRY
from fedskew.watch.history import History

MOST_RUNS = 300  # in the list: those written last
MOST_STAGES = 1_000_000  # rounds for which a method is asked for its stages
RECENT = 20  # records that the time left is computed from
INTERVAL = 1.0  # seconds between looks at the folder
TEXT = 300  # letters of a setting that are shown
MAY_DIFFER = ("method", "seed")  # settings that may differ between runs that are drawn over each other


class Ending(msgspec.Struct, frozen=True):
    """What is needed of a run's result."""

    diverged: str = ""
    stopped: str = ""
    settings: dict[str, Any] = {}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list."""

    id: str  # names the run in requests; hexadecimal
    name: str  # its path in the folder
    method: str
    data: str  # its name; of a path the last part
    split: str
    seed: str
    state: State
    why: str  # of a run that failed or ended early; "": nothing to say
    round: int  # finished rounds
    rounds: int  # of the whole run; 0: not known
    ends: float | None  # when it will be finished, in seconds since 1970; None: not known, or not running
    figure: str  # words of the leading figure; "": not evaluated yet
    value: str  # of the leading figure, with its unit
    written: float  # when the last record was written, in seconds since 1970


class Watched:
    """One run. `row` and `history` read what is new."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, readable(name)
        self.id = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        self.seen: tuple[Any, ...] = ()
        self.cached: Row | None = None
        self.settings_seen: Any = None
        self.settings: dict[str, Any] = {}
        self.method, self.rounds = "", 0
        self.group = ""  # what runs that are drawn over each other have in common
        self.history = History()

    def stamp(self, name: str) -> tuple[int, int] | None:
        """(size, time of the last change) of one of the run's files; None if it is no regular file."""
        try:
            found = os.lstat(self.path / name)
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str, kind: type[Any]) -> Any:
        """One of the run's small files; None if it is not there or cannot be read."""
        return read_small(self.path / name, kind) if self.stamp(name) else None

    def _read_settings(self) -> None:
        seen = self.stamp(SETTINGS)
        if seen == self.settings_seen:
            return
        self.settings_seen = seen
        try:
            self.settings = tomllib.loads((self.read(SETTINGS, bytes) or b"").decode())
        except (ValueError, RecursionError):
            self.settings = {}
        self.method, self.rounds = described(self.settings)
        self.group = repr(sorted((key, repr(v)) for key, v in self.settings.items() if key not in MAY_DIFFER))

    @property
    def seed(self) -> str:
        """The seed as text."""
        return short(self.settings.get("seed", 0))

    def row(self) -> Row:
        """The run's line in the list."""
        records = self.stamp(RECORDS)
        locked = self.stamp(LOCK) is not None and is_locked(self.path / LOCK, self.path / RECORDS)
        seen = (records, self.stamp(RESULT), self.stamp(FAILURE), self.stamp(SETTINGS), locked)
        if self.cached is None or seen != self.seen:
            self.seen, self.cached = seen, self._row(records, locked)
        return self.cached

    def _row(self, records: tuple[int, int] | None, locked: bool) -> Row:
        self._read_settings()
        recent = []
        if records is not None:
            try:
                recent = last_records(self.path / RECORDS, RECENT)
            except OSError:
                records = None
        state, why = self._state(locked)
        written = records[1] / 1e9 if records else 0.0
        left = seconds_left(self.rounds, recent) if state == "running" else None
        evaluated = [record.metrics for record in recent if record.metrics is not None]
        figure = leading_figure(evaluated[-1]) if evaluated else None
        value = f"{figure.text(figure.of(evaluated[-1]))} {figure.unit}".strip() if figure else ""
        return Row(
            id=self.id,
            name=self.name,
            method=self.method,
            data=short(str(self.settings.get("data", "")).rpartition("/")[2]),
            split=short(self.settings.get("split", "")),
            seed=self.seed,
            state=state,
            why=why,
            round=recent[-1].number if recent else 0,
            rounds=self.rounds,
            ends=round(written + left, 1) if left is not None and math.isfinite(left) else None,
            figure=f"{figure.words.partition(':')[0]}: {figure.measure}" if figure else "",
            value=value,
            written=written,
        )

    def _state(self, locked: bool) -> tuple[State, str]:
        """The state, and why it failed or ended early."""
        if self.stamp(RESULT):
            ending = self.read(RESULT, Ending) or Ending()
            warned = ending.settings.get("on_divergence") == "warn"
            if ending.diverged and not warned:
                return "failed", ending.diverged
            return "finished", ending.stopped or ending.diverged
        if locked:
            return "running", ""
        failure = self.read(FAILURE, Failure)
        return ("failed", failure.why) if failure is not None else ("stopped", "")


class Folder:
    """The watched folder. Its methods may be called from several threads."""

    def __init__(self, root: Path) -> None:
        try:
            self.root = root.resolve(strict=True)
        except OSError:
            raise UsageError(f"{root} does not exist: expected a folder of runs.") from None
        if not self.root.is_dir():
            raise UsageError(f"{root} is not a folder: expected a folder of runs.")
        self.runs: dict[str, Watched] = {}
        self.rows: list[Row] = []
        self.looked = -INTERVAL
        self.lock = threading.Lock()
        self.dumped: dict[str, tuple[object, dict[str, str]]] = {}  # what pages were last sent, by run, see app.py

    def look(self) -> list[Row]:
        """The runs, the one written last first; looked up at most once in `INTERVAL` seconds."""
        if time.monotonic() - self.looked >= INTERVAL:
            known = {run.path: run for run in self.runs.values()}
            found = [known.get(path) or Watched(path, self._name(path)) for path in run_folders(self.root)]
            self.runs = {run.id: run for run in found}
            rows = [run.row() for run in self.runs.values()]
            self.rows = sorted(rows, key=lambda row: (row.state == "running", row.written), reverse=True)
            self.looked = time.monotonic()
        return self.rows

    def _name(self, path: Path) -> str:
        return self.root.name if path == self.root else path.relative_to(self.root).as_posix()

    def chosen(self, id: str) -> Watched | None:
        """The run with this id; the first of the list if there is none; None if there are no runs."""
        return self.runs.get(id) or (self.runs[self.rows[0].id] if self.rows else None)

    def together(self, run: Watched) -> list[Watched]:
        """The other runs that have its settings but for method and seed, the one written last first."""
        return [self.runs[r.id] for r in self.rows if r.id != run.id and self.runs[r.id].group == run.group]


def run_folders(root: Path) -> Iterator[Path]:
    """The folders of runs in a folder, at any depth. Those inside a run, and symbolic links, are not entered."""
    for place, folders, files in os.walk(root, followlinks=False):
        if SETTINGS in files:
            folders.clear()
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".")]


def described(settings: dict[str, Any]) -> tuple[str, int]:
    """(the method in words, the number of rounds) of settings as plain values; 0 rounds if that is not known.

    Only methods of fedskew itself are built: the name of another one may be that of a file of code.
    """
    table = settings.get("method", {})
    try:
        table = method_table(table) if isinstance(table, str) else dict(table)
    except (UsageError, TypeError, ValueError):
        table = {}
    name = str(table.get("name", "fedavg"))
    rounds = settings.get("rounds", 0)
    rounds = rounds if isinstance(rounds, int) and rounds > 0 else 0
    if name not in REGISTRY:
        own = ",".join(f"{key}={value}" for key, value in table.items() if key != "name")
        return short(f"{name}:{own}" if own else name), rounds
    try:
        method = method_from(table)
    except UsageError:
        return short(name), rounds
    return short(method_text(method)), len(method.stages(rounds)) if rounds <= MOST_STAGES else rounds


def readable(text: str) -> str:
    """A text without what is no letter in Unicode, as the name of a folder may have."""
    return text.encode(errors="replace").decode()


def short(value: object) -> str:
    """A value as text of at most `TEXT` letters."""
    text = readable(str(value))
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"
