"""The runs and studies under one folder: which there are, and their state.

Everything is read from regular files in folders that are really there: symbolic links are not followed, so nothing
outside the folder is read whatever is in it. A run is found by its id in the list of runs, never by a path that a
browser sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.experiment.progress import PROGRESS
from fedskew.experiment.run_directory import SETTINGS
from fedskew.watch.entry import Entry, Row
from fedskew.watch.study import Study
from fedskew.watch.watched import Watched

MOST_RUNS = 300  # in the list: those written last
INTERVAL = 1.0  # seconds between looks at the folder
FRESH = 5.0  # seconds for which a new page begins with what was found last; its stream then brings what is new
PATIENCE = 0.05  # seconds that a new page waits for another thread to be done


class Folder:
    """The watched folder. Its methods may be called from several threads."""

    def __init__(self, root: Path) -> None:
        try:
            self.root = root.resolve(strict=True)
        except OSError:
            raise UsageError(f"{root} does not exist: expected a folder of runs.") from None
        if not self.root.is_dir():
            raise UsageError(f"{root} is not a folder: expected a folder of runs.")
        self.runs: dict[str, Entry] = {}
        self.rows: list[Row] = []
        self.looked = float("-inf")  # when, by the monotonic clock
        self.lock = threading.Lock()
        self.dumped: dict[str, tuple[object, dict[str, str]]] = {}  # what pages were last sent, by run, see app.py

    def look(self) -> list[Row]:
        """The runs, the one written last first; looked up at most once in `INTERVAL` seconds."""
        if time.monotonic() - self.looked >= INTERVAL:
            known = {(run.place, type(run)): run for run in self.runs.values()}
            found = [known.get(one) or self._entry(*one) for one in run_folders(self.root)]
            self.runs = {run.id: run for run in found}
            self.rows = sorted((run.row() for run in self.runs.values()), key=_order)
            self.looked = time.monotonic()
        return self.rows

    def glance(self) -> list[Row]:
        """The same, but quickly: what was found in the last seconds, or before another thread began to read."""
        if time.monotonic() - self.looked < FRESH or not self.lock.acquire(timeout=PATIENCE):
            return self.rows
        try:
            return self.look()
        finally:
            self.lock.release()

    def _entry(self, place: str, kind: type[Watched | Study]) -> Watched | Study:
        path = Path(place)
        return kind(path, self.root.name if path == self.root else path.relative_to(self.root).as_posix())

    def chosen(self, id: str) -> Entry | None:
        """The run or study with this id; the first of the list if there is none; None if the list is empty."""
        return self.runs.get(id) or (self.runs[self.rows[0].id] if self.rows else None)

    def together(self, run: Entry) -> list[Watched]:
        """The other runs that have its settings but for method and seed, the one written last first."""
        others = (self.runs[row.id] for row in self.rows if row.id != run.id)
        return [other for other in others if isinstance(other, Watched) and other.group == run.group]


def _order(row: Row) -> tuple[bool, bool, float]:
    """What is running comes first, a study before its runs; then what was written last."""
    running = row.state == "running"
    return not running, not (running and row.unit), -row.written


def run_folders(root: Path) -> Iterator[tuple[str, type[Watched | Study]]]:
    """(path, kind) of the runs and studies in a folder, at any depth. Folders inside a run, and links, are left out."""
    for place, folders, files in os.walk(root, followlinks=False):
        if SETTINGS in files:
            folders.clear()
            yield place, Watched
        elif PROGRESS in files:
            yield place, Study
        folders[:] = [name for name in folders if not name.startswith(".")]
