"""The states of simulated clients: recently used ones in memory, the others on disk, so that memory stays bounded.

A state on disk is `<folder>/<client>.<round>.safetensors`, one file for each version. New states are staged and
take effect when the round is committed. An empty state (as of FedAvg's clients) has no file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedskew.core.files import sha256

Blob = bytes | bytearray


class Version(NamedTuple):
    """One committed version of one client's state."""

    client: int
    round: int
    sha256: str  # of its file; "" for an empty state


class Damaged(ValueError):
    """A file is missing, or its checksum does not match."""


class Store:
    """The states of clients, as bytes, by client number.

    `memory` is the size of the cache in bytes; states that do not fit are written to `folder`. With `folder` None
    all states stay in memory.
    """

    def __init__(self, folder: Path | None = None, memory: int = 256 << 20) -> None:
        self.folder, self.memory = folder, memory
        self.cache: OrderedDict[tuple[int, int], Blob] = OrderedDict()  # (client, round); least recently used first
        self.size = 0  # bytes in the cache
        self.written: dict[tuple[int, int], str] = {}  # versions on disk, with their SHA-256
        self.rounds: dict[int, list[int]] = {}  # committed versions of each client, newest last
        self.staged: dict[int, int] = {}  # client -> round
        self.unlisted: list[tuple[int, int]] = []  # versions committed since the last `flush`

    def __contains__(self, client: int) -> bool:
        """Whether this client has ever finished a round."""
        return client in self.rounds

    def version(self, client: int) -> int | None:
        """The round of a client's current state; None if it has none."""
        return self.rounds[client][-1] if client in self.rounds else None

    def get(self, client: int) -> Blob:
        """A client's state after its last committed round; b"" if it has none."""
        if client not in self.rounds:
            return b""
        key = (client, self.rounds[client][-1])
        if key in self.cache:
            self.cache.move_to_end(key)
            return self.cache[key]
        if self.written.get(key) == "":
            return b""
        blob = self._path(key).read_bytes()
        self._remember(key, blob)
        return blob

    def stage(self, client: int, round: int, blob: Blob) -> None:
        """Keep a client's new state until `commit` or `discard`."""
        self.staged[client] = round
        self._remember((client, round), blob)

    def commit(self, accepted: Sequence[int]) -> None:
        """Make the staged states of accepted clients current, and discard the others."""
        for client in accepted:
            if client in self.staged:
                self.rounds.setdefault(client, []).append(self.staged.pop(client))
                self.unlisted.append((client, self.rounds[client][-1]))
        self.discard()
        if self.folder is None:
            self.prune(before=None)

    def discard(self) -> None:
        """Drop all staged states."""
        for key in self.staged.items():
            self._forget(key)
        self.staged.clear()

    def flush(self, until: int) -> list[Version]:
        """Write the states committed since the last flush, up to round `until`, to disk; returns their versions."""
        due = [key for key in self.unlisted if key[1] <= until]
        for key in due:
            if key not in self.written:
                self._write(key, self.cache[key])
        self.unlisted = [key for key in self.unlisted if key[1] > until]
        return [Version(*key, self.written[key]) for key in due]

    def prune(self, before: int | None) -> None:
        """Remove versions that no checkpoint of round `before` or later needs; None keeps only the newest version."""
        for client, rounds in self.rounds.items():
            if len(rounds) > 1:
                old = rounds[:-1] if before is None else [r for r in rounds if r <= before][:-1]
                for round in old:
                    self._forget((client, round))
                    rounds.remove(round)

    def restore(self, versions: Iterable[Version]) -> None:
        """Restore the versions that earlier flushes returned, oldest first. Raises Damaged if a current file is."""
        for version in versions:
            self.rounds.setdefault(version.client, []).append(version.round)
            self.written[version.client, version.round] = version.sha256
        for client, rounds in self.rounds.items():
            key = (client, rounds[-1])
            if (sha := self.written[key]) and (
                not self._path(key).exists() or sha256(self._path(key).read_bytes()) != sha
            ):
                raise Damaged(f"the state of client {client} after round {rounds[-1]} is missing or damaged")

    def _remember(self, key: tuple[int, int], blob: Blob) -> None:
        self.size += len(blob) - len(self.cache.pop(key, b""))
        self.cache[key] = blob
        while self.folder is not None and self.size > self.memory and len(self.cache) > 1:
            oldest, spilled = self.cache.popitem(last=False)
            self.size -= len(spilled)
            if oldest not in self.written:
                self._write(oldest, spilled)

    def _forget(self, key: tuple[int, int]) -> None:
        self.size -= len(self.cache.pop(key, b""))
        if self.written.pop(key, ""):
            self._path(key).unlink(missing_ok=True)

    def _write(self, key: tuple[int, int], blob: Blob) -> None:
        if blob:
            self._path(key).parent.mkdir(parents=True, exist_ok=True)
            self._path(key).write_bytes(blob)
        self.written[key] = sha256(blob) if blob else ""

    def _path(self, key: tuple[int, int]) -> Path:
        assert self.folder is not None
        return self.folder / f"{key[0]}.{key[1]}.safetensors"
