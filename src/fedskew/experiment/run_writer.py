"""Writes the directory of a run in progress: its records, its checkpoints, and what resuming goes back to.

See run_directory.py for the files. A checkpoint also contains the lengths of records.jsonl and clients.jsonl at that
time, to which resuming truncates them, and marks of settings and data, which must not have changed when the run is
resumed; only rounds may be added. A checkpoint is written under a temporary name and renamed after all files it refers
to are on disk. The last two are kept: if the checksum of one does not match, the one before it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import msgspec

from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.sources.formats import reading
from fedskew.experiment.card import ModelCard
from fedskew.experiment.config import Experiment, read_toml
from fedskew.experiment.extension import check_data, check_settings, code_marks
from fedskew.experiment.result import Result
from fedskew.experiment.run_directory import (
    CARD,
    MODEL,
    RECORDS,
    RESULT,
    SERVER,
    SETTINGS,
    VERSIONS,
    is_finished,
    is_run,
    parse_versions,
    read_records,
    read_result,
    versions,
)
from fedskew.federation.protocol import Record
from fedskew.federation.store import Damaged, Store
from fedskew.federation.wire import decode_with_notes, encode

KEPT_CHECKPOINTS = 2


PROBED = 0.3  # seconds to try for the lock, which a viewer may hold for a moment (see live.py)


SPACING = 20  # with automatic spacing, checkpoints take at most about one twentieth of the time


class RunWriter:
    """Writes the directory of a run in progress; locks it until `close`, so that no other run writes to it.

    `every` is the number of rounds between checkpoints; 0 spaces them so that they take at most about one twentieth
    of the time. `data` identifies the run's samples, which must be the same when it is resumed; "": not checked.
    """

    def __init__(self, path: Path, every: int = 0, data: str = "") -> None:
        self.path, self.every, self.data = path, every, data
        self.store = Store(path / "clients")
        self.cost, self.last = 0.0, (-1, time.monotonic())  # seconds a checkpoint takes; (round, time) of the last
        self.previous = -1  # round of the checkpoint before the last one; -1: none
        self.settings: dict[str, Any] = {}  # of the run, once it has begun or is restored
        self.code: dict[str, str] = {}  # likewise: files of the user's own code, with their SHA-256
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock = filelock.FileLock(path / ".lock")
            self.lock.acquire(timeout=PROBED)
        except OSError as error:
            if isinstance(error, filelock.Timeout):
                raise UsageError(f"{path} is in use by another run.") from None
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None

    @property
    def records(self) -> Path:
        """The file of the records."""
        return self.path / RECORDS

    @property
    def index(self) -> Path:
        """The file of the versions of client states."""
        return self.path / VERSIONS

    def begin(self, experiment: Experiment) -> None:
        """Start a new run; UsageError if the directory contains one already."""
        if is_run(self.path):
            self.close()
            raise UsageError(
                f"{self.path} already holds a run; resume it with --resume {self.path}, or give another --out."
            )
        self._write_settings(experiment)
        self.records.touch()
        self.index.touch()

    def _write_settings(self, experiment: Experiment) -> None:
        self.settings, self.code = experiment.as_dict(), code_marks(experiment)
        write_atomically(self.path / SETTINGS, experiment.to_toml().encode())

    def describe(self, card: ModelCard) -> None:
        """Write what one must know to use the model."""
        write_atomically(self.path / CARD, msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")

    def append(self, record: Record) -> None:
        """Add one record, whole or, if that fails on a full disk, not at all."""
        size = self.records.stat().st_size
        try:
            with self.records.open("ab") as file:
                file.write(msgspec.json.encode(record.as_dict()) + b"\n")
        except BaseException:
            self._truncate(self.records, size)
            raise

    def due(self, round: int) -> bool:
        """Whether a checkpoint is due after this round."""
        if self.every:
            return (round + 1) % self.every == 0
        return time.monotonic() - self.last[1] >= SPACING * self.cost

    def save(self, round: int, server: Payload) -> None:
        """Write a checkpoint of the server's state and the clients' states after this round."""
        if round == self.last[0]:
            return
        began = time.monotonic()
        with self.index.open("a") as file:
            for version in self.store.flush(until=round):
                file.write(json.dumps(version._asdict()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        notes = {
            "round": round,
            "records": self.records.stat().st_size,
            "index": self.index.stat().st_size,
            "versions": versions(),
            "settings": self.settings,
            "data": self.data,
            "code": self.code,
        }
        blob = encode(server, notes)
        write_atomically(self.path / "checkpoints" / f"{round:06d}-{sha256(blob)}.safetensors", blob)
        self.previous = self.last[0]
        for old in self.checkpoints()[KEPT_CHECKPOINTS:]:
            old.unlink()
        if self.previous >= 0:
            self.store.prune(before=self.previous)
        self.cost, self.last = time.monotonic() - began, (round, time.monotonic())

    def checkpoints(self) -> list[Path]:
        """The files of the checkpoints, newest first."""
        return sorted((self.path / "checkpoints").glob("*-*.safetensors"), reverse=True)

    def restore(self, experiment: Experiment) -> tuple[tuple[int, Payload] | None, list[str]]:
        """Go back to the newest usable checkpoint; returns ((next round, server state), messages for the user).

        Without a usable checkpoint the run starts again: None in place of round and state. UsageError if the settings
        of `experiment` are not those of the checkpoint, unless it has more rounds and the result is that of a run
        that had them from the start. Nothing is changed then.
        """
        try:
            found = self._restore(experiment)
        except UsageError:
            self.close()
            raise
        self.settings, self.code = experiment.as_dict(), code_marks(experiment)
        if found[0] is None or read_toml(self.path / SETTINGS).get("rounds") != experiment.rounds:
            self._write_settings(experiment)
            (self.path / RESULT).unlink(missing_ok=True)  # of the run with fewer rounds
        return found

    def _restore(self, experiment: Experiment) -> tuple[tuple[int, Payload] | None, list[str]]:
        notes: list[str] = []
        for path in self.checkpoints():
            try:
                start, saved = self._restore_from(path, experiment)
                written, code = saved["versions"], saved.get("code", {})
                if changed := [f"{name} {was}" for name, was in written.items() if versions().get(name) != was]:
                    notes.append(f"the run was started with {', '.join(changed)}: results may not be bit-identical")
                now = code_marks(experiment)
                if edited := [file for file, was in code.items() if now.get(file, was) != was]:
                    notes.append(
                        f"{', '.join(edited)} changed after the run began: earlier rounds used another version"
                    )
                return start, notes
            except UsageError:
                raise
            except (Damaged, OSError, ValueError) as error:
                notes.append(f"checkpoint {path.name[:6]} cannot be used: {error}")
                self.store = Store(self.path / "clients")
        self._truncate(self.records, 0)
        self._truncate(self.index, 0)
        return None, notes

    def _restore_from(self, path: Path, experiment: Experiment) -> tuple[tuple[int, Payload], dict[str, Any]]:
        """((next round, server state), notes of the checkpoint); raises Damaged, OSError or ValueError."""
        blob = bytearray(path.read_bytes())
        if sha256(blob) != path.stem.partition("-")[2]:
            raise Damaged("its checksum does not match")
        server, notes = decode_with_notes(blob)
        check_settings(notes.get("settings") or read_toml(self.path / SETTINGS), experiment, notes["round"] + 1)
        check_data(notes.get("data", ""), self.data)
        if self.records.stat().st_size < notes["records"] or self.index.stat().st_size < notes["index"]:
            raise Damaged(f"{RECORDS} or {VERSIONS} is shorter than it was at this checkpoint")
        self.store.restore(parse_versions(self.index.read_bytes()[: notes["index"]]))
        self._truncate(self.records, notes["records"])
        self._truncate(self.index, notes["index"])
        for newer in self.checkpoints():
            if newer.name > path.name:
                newer.unlink()
        self.last = (notes["round"], time.monotonic())
        return (notes["round"] + 1, server), notes

    @staticmethod
    def _truncate(path: Path, size: int) -> None:
        with path.open("ab") as file:
            file.truncate(size)

    def read_records(self) -> list[Record]:
        """The records so far, with late client metrics moved to the round they belong to; UsageError if damaged."""
        with self._closing_if_damaged(self.records):
            return read_records(self.records)

    def finish(self, server: Payload, model: Payload, result: Result) -> None:
        """Write the final state of the server, the global model and the result."""
        write_atomically(self.path / SERVER, encode(server))
        write_atomically(self.path / MODEL, encode(model))
        write_atomically(self.path / RESULT, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")

    def result(self) -> Result | None:
        """The result; None if the run is not finished; UsageError if it is damaged."""
        with self._closing_if_damaged(self.path / RESULT):
            return read_result(self.path / RESULT) if is_finished(self.path) else None

    @contextlib.contextmanager
    def _closing_if_damaged(self, path: Path) -> Iterator[None]:
        try:
            with reading(path):
                yield
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the directory."""
        self.lock.release()
