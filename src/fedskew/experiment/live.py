"""A run's directory seen from outside while the run goes on. `fedskew watch` reads it through this module.

Beside the files of run_directory.py, a run writes here what only a viewer needs, small whatever the number of clients:

    split.json              samples by client and class, of at most `MOST_CLIENTS` clients
    client_accuracy.jsonl   one line per evaluated round: accuracy and loss of the same clients' own models, and of
                            those that do worst in that round
    failure.json            why the run ended with an error; absent if it did not

Reading changes nothing and takes no time from the run. Settings are read as plain values: no method is built from them,
so looking at a folder never runs code that its settings name.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fedskew.core.files import write_atomically
from fedskew.data.split.skew import MAX_CLIENTS
from fedskew.federation.protocol import Record, merge_late

try:
    from fcntl import LOCK_NB, LOCK_SH, flock
except ImportError:  # no such locks on this system, see `is_locked`
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

State = Literal["running", "stopped", "failed", "finished"]
SPLIT, ACCURACY, FAILURE, LOCK = "split.json", "client_accuracy.jsonl", "failure.json", ".lock"
MOST_CLIENTS = MAX_CLIENTS  # of more clients every n-th is written
WORST = 10  # clients with the lowest accuracy that are written as well then
QUIET = 600.0  # where locks cannot be tested: seconds without a record after which a run counts as stopped
MARK = 64  # bytes before the end of what was read, by which a file that was rewritten is recognised
CHUNK = 1 << 21  # bytes that are read in one go
LARGEST = 1 << 26  # bytes of a file that is read whole
TAIL = 1 << 16  # bytes at the end of a file that hold its last record, unless that is longer


class Split(msgspec.Struct, frozen=True):
    """Samples by client and class: split.json."""

    clients: int  # how many there are
    step: int  # every so many-th of them is listed; 1: all
    classes: int
    points: list[tuple[int, int, int]]  # (place in the list of clients, class, samples), where there are samples
    note: str = ""  # what a reader must know


class ClientFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Clients' own models after a round: a line of client_accuracy.jsonl."""

    round: int  # counted from 0
    step: int  # value i is that of client i * step
    values: list[float | None]  # accuracies; None: that client was not evaluated
    losses: list[float | None] = []  # None: not evaluated, or not finite. [] in files of earlier versions
    population: int = 0  # how many clients there are; 0 in files of earlier versions
    # (client, accuracy, loss) of the clients with the lowest accuracy, where not all clients are in `values`
    worst: list[tuple[int, float | None, float | None]] = []

    def by_client(self) -> dict[int, tuple[float | None, float | None]]:
        """(accuracy, loss) of every client in this line, by its number."""
        listed = zip(self.values, [*self.losses, *[None] * len(self.values)], strict=False)
        worst = {client: (accuracy, loss) for client, accuracy, loss in self.worst}
        return {i * self.step: pair for i, pair in enumerate(listed)} | worst


class Failure(msgspec.Struct, frozen=True):
    """Why a run ended with an error: failure.json."""

    why: str


def write_split(path: Path, table: npt.NDArray[np.int64], note: str = "") -> None:
    """Write split.json of the run in this directory; `table` is [clients, classes]."""
    step = -(-len(table) // MOST_CLIENTS) or 1
    client, label = np.nonzero(table[::step])
    points = np.stack([client, label, table[::step][client, label]], 1).tolist()
    split = Split(len(table), step, table.shape[1], [(c, y, n) for c, y, n in points], note)
    write_atomically(path / SPLIT, msgspec.json.encode(split))


def append_clients(path: Path, round: int, figures: Mapping[int, tuple[float, float]], population: int) -> None:
    """Append a line to client_accuracy.jsonl: (accuracy, loss) by client number, of `population` clients."""
    if not figures:
        return
    step = -(-population // MOST_CLIENTS) or 1
    listed = [figures.get(client, (math.nan, math.nan)) for client in range(0, population, step)]
    lowest = nsmallest(WORST, figures, key=lambda client: figures[client][0]) if step > 1 else []
    line = ClientFigures(
        round,
        step,
        [_digits(accuracy) for accuracy, _ in listed],
        [_digits(loss) for _, loss in listed],
        population,
        [(client, _digits(figures[client][0]), _digits(figures[client][1])) for client in lowest],
    )
    with (path / ACCURACY).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _digits(value: float) -> float | None:
    """The value with three digits behind the point; None if it is not finite."""
    return float(f"{value:.3f}") if math.isfinite(value) else None


def write_failure(path: Path, error: BaseException) -> None:
    """Write why the run ended, unless its user ended it. A disk that is full keeps nothing more."""
    if isinstance(error, Exception):
        why = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError):
            write_atomically(path / FAILURE, msgspec.json.encode(Failure(why)))


def clear_failure(path: Path) -> None:
    """Forget the failure of a run that starts or goes on."""
    (path / FAILURE).unlink(missing_ok=True)


def is_locked(lock: Path, records: Path) -> bool:
    """Whether a process holds the lock of a run's directory. One that was killed holds none.

    The shared lock that this takes for a moment makes no run fail: a run that starts tries for longer than that. Where
    the system has no such locks, a run counts as going on while `records` was written in the last minutes.
    """
    if not HAS_LOCKS:
        with contextlib.suppress(OSError):
            return time.time() - records.stat().st_mtime < QUIET
        return False
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        flock(handle, LOCK_SH | LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _not_a_link(path: str, flags: int) -> int:
    """Opens a file, but not through a symbolic link, which may lead out of the folder that is watched."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def read_small(path: Path, kind: type[Any]) -> Any:
    """The JSON in a file as a `kind` (bytes: as it is); None if it cannot be read or is larger than `LARGEST`."""
    try:
        with open(path, "rb", opener=_not_a_link) as file:
            blob = file.read(LARGEST + 1)
        if len(blob) > LARGEST:
            return None
        return blob if kind is bytes else msgspec.json.decode(blob, type=kind)
    except (OSError, ValueError, RecursionError):
        return None


class Lines:
    """A file of JSON lines that grows: `read` returns the lines since the last call. A broken line is left out.

    If the file was cut off or rewritten, as resuming a run does, it is read from its beginning.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.decode: Callable[[bytes], Any] = msgspec.json.Decoder(kind).decode
        self.offset, self.mark = 0, b""

    def read(self, path: Path) -> tuple[bool, list[Any]]:
        """(whether what was read before is void, the new lines). At most `CHUNK` bytes, unless one line is longer."""
        with open(path, "rb", opener=_not_a_link) as file:
            file.seek(self.offset - len(self.mark))
            anew = file.read(len(self.mark)) != self.mark
            if anew:
                self.offset, self.mark = 0, b""
                file.seek(0)
            blob = file.read(CHUNK)
            while len(blob) >= CHUNK and b"\n" not in blob and (more := file.read(CHUNK)):
                blob += more
        complete = blob[: blob.rfind(b"\n") + 1]
        if complete:
            self.offset, self.mark = self.offset + len(complete), (self.mark + complete)[-MARK:]
        return anew, [line for text in complete.splitlines() if (line := self._decoded(text)) is not None]

    def _decoded(self, text: bytes) -> Any:
        try:
            return self.decode(text)
        except (ValueError, RecursionError):
            return None


def last_records(path: Path, count: int) -> list[Record]:
    """Up to `count` of the last records in a file of records, without reading the rest; [] if there is none."""
    with open(path, "rb", opener=_not_a_link) as file:
        size, back = file.seek(0, os.SEEK_END), TAIL
        while True:
            file.seek(max(0, size - back))
            blob = file.read(min(size, back))
            complete = blob[: blob.rfind(b"\n") + 1].splitlines()
            if size > back:
                complete = complete[1:]  # its beginning is missing
            if complete or back >= size:
                break
            back *= 8
    decode, found = Lines(Record)._decoded, []
    for text in complete[-count:]:
        if (record := decode(text)) is not None:
            found.append(record)
    return merge_late(found)


def seconds_left(rounds: int, recent: Sequence[Record]) -> float | None:
    """Seconds from the last record until a run of `rounds` rounds ends, by its last records; None if it has none."""
    if not recent:
        return None
    each = sum(record.seconds for record in recent) / len(recent)
    return max(0.0, each * (rounds - recent[-1].number))
