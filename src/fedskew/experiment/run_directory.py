"""A run's directory: settings, records, and checkpoints from which a killed run goes on.

    settings.toml       the experiment, as it was run
    records.jsonl       one record a round
    clients/            states that clients keep, a file a version
    clients.jsonl       which version of which client counts, with checksums, in order
    checkpoints/        the server's state after a round; the name ends in the file's own SHA-256
    server.safetensors  model.safetensors  result.json     when the run is done

A checkpoint also says how far records.jsonl and clients.jsonl reach, so whatever was written after it
is cut off. It becomes visible by a rename, after all it speaks of is on disk. The last two are kept:
if one is torn or was changed, its checksum tells, and the one before is used.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from fedskew import __version__
from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.federation.store import Damaged, Entry, Store
from fedskew.federation.wire import decode_with_notes, encode

KEPT = 2
RELUCTANCE = 20  # with automatic spacing, checkpoints take at most about a twentieth of the time


def versions() -> dict[str, str]:
    return {
        "fedskew": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


class RunDirectory:
    """`every`: rounds between checkpoints; 0 spaces them so that they stay cheap."""

    def __init__(self, path: Path, every: int = 0) -> None:
        self.path, self.every = path, every
        self.store = Store(path / "clients")
        self.cost, self.last = 0.0, (-1, time.monotonic())  # seconds of a checkpoint; (round, when) of the last
        self.previous = -1  # round of the checkpoint before the last
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock = filelock.FileLock(path / ".lock")
            self.lock.acquire(timeout=0)
        except OSError as error:
            if isinstance(error, filelock.Timeout):
                raise UsageError(f"{path} is in use by another run.") from None
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None

    @property
    def records(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def index(self) -> Path:
        return self.path / "clients.jsonl"

    def begin(self, settings: str) -> None:
        """A new run: the directory must not hold one."""
        if (self.path / "settings.toml").exists():
            self.close()
            raise UsageError(
                f"{self.path} already holds a run; go on with --resume {self.path}, or give another --out."
            )
        write_atomically(self.path / "settings.toml", settings.encode())
        self.records.touch()
        self.index.touch()

    def append(self, record: dict[str, Any]) -> None:
        with self.records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def due(self, round: int) -> bool:
        if self.every:
            return (round + 1) % self.every == 0
        return time.monotonic() - self.last[1] >= RELUCTANCE * self.cost

    def save(self, round: int, server: Payload) -> None:
        """A checkpoint after this round."""
        if round == self.last[0]:
            return
        began = time.monotonic()
        with self.index.open("a") as file:
            for entry in self.store.flush(until=round):
                file.write(json.dumps(entry._asdict()) + "\n")
        notes = {
            "round": round,
            "records": self.records.stat().st_size,
            "index": self.index.stat().st_size,
            "versions": versions(),
        }
        blob = encode(server, notes)
        write_atomically(self._checkpoint(round, sha256(blob)), blob)
        self.previous = self.last[0]
        for old in self.checkpoints()[KEPT:]:
            old.unlink()
        if self.previous >= 0:
            self.store.prune(before=self.previous)
        self.cost, self.last = time.monotonic() - began, (round, time.monotonic())

    def _checkpoint(self, round: int, sha: str) -> Path:
        return self.path / "checkpoints" / f"{round:06d}-{sha}.safetensors"

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("*-*.safetensors"), reverse=True)

    def restore(self) -> tuple[tuple[int, Payload] | None, list[str]]:
        """((next round, server state), what was wrong); None where there is no checkpoint to go on from."""
        troubles: list[str] = []
        for path in self.checkpoints():
            try:
                start, written = self._take_up(path)
                if changed := [f"{name} {was}" for name, was in written.items() if versions().get(name) != was]:
                    troubles.append(f"it was begun with {', '.join(changed)}: its bits may come out otherwise")
                return start, troubles
            except (Damaged, OSError, ValueError) as error:
                troubles.append(f"checkpoint {path.name[:6]} cannot be used: {error}")
                self.store = Store(self.path / "clients")
        self._cut(self.records, 0)
        self._cut(self.index, 0)
        return None, troubles

    def _take_up(self, path: Path) -> tuple[tuple[int, Payload], dict[str, str]]:
        """((next round, server state), versions it was written with); raises if anything is not as it was."""
        blob = bytearray(path.read_bytes())
        if sha256(blob) != path.stem.partition("-")[2]:
            raise Damaged("its checksum does not match")
        server, notes = decode_with_notes(blob)
        if self.records.stat().st_size < notes["records"] or self.index.stat().st_size < notes["index"]:
            raise Damaged("records.jsonl or clients.jsonl is shorter than it was")
        listed = self.index.read_bytes()[: notes["index"]]
        self.store.restore(Entry(**json.loads(line)) for line in listed.splitlines())
        self._cut(self.records, notes["records"])
        self._cut(self.index, notes["index"])
        for newer in self.checkpoints():
            if newer.name > path.name:
                newer.unlink()
        self.last = (notes["round"], time.monotonic())
        return (notes["round"] + 1, server), notes["versions"]

    @staticmethod
    def _cut(path: Path, size: int) -> None:
        with path.open("ab") as file:
            file.truncate(size)

    def read_records(self) -> Iterator[dict[str, Any]]:
        with self.records.open() as file:
            for line in file:
                yield json.loads(line)

    def finish(self, server: Payload, model: Payload, result: dict[str, Any]) -> None:
        write_atomically(self.path / "server.safetensors", encode(server))
        write_atomically(self.path / "model.safetensors", encode(model))
        write_atomically(self.path / "result.json", (json.dumps(result, indent=2) + "\n").encode())

    def result(self) -> dict[str, Any]:
        """The closing figures, if the run got that far."""
        path = self.path / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def close(self) -> None:
        self.lock.release()
