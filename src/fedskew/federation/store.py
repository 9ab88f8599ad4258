"""The states of simulated clients: recently used ones in memory, the others on disk, so that memory stays bounded.

States on disk are in segments, a few large files (see segments.py). Runs of earlier versions have a file for each
state, `<folder>/<client>.<round>.safetensors`, which is read as well. New states are staged and take effect when the
round is committed. An empty state (as of FedAvg's clients) takes no space.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fedskew.core.files import make_owned_folder, sha256, usable_memory
from fedskew.federation.segments import Place, Segments

Blob = bytes | bytearray
Key = tuple[int, int]  # client, round


class Version(NamedTuple):
    """One committed version of one client's state."""

    client: int
    round: int
    sha256: str  # "" for an empty state
    place: Place | None = None  # in the segments; None: empty, or in a file of its own


def memory_for_states() -> int:
    """Bytes of memory for client states: a sixteenth of what this process may use, from 256 MB to 2 GB.

    Writing a state to disk and reading it again takes a fifth of the time of a small client's round.
    """
    return min(max(usable_memory() // 16, 256 << 20), 2 << 30)


class Damaged(ValueError):
    """A file is missing, or its checksum does not match."""


class Store:
    """The states of clients, as bytes, by client number.

    `memory` is the size of the cache in bytes, None: `memory_for_states()`. States that do not fit are written to
    `folder`. With `folder` None they are written to a temporary folder, which is removed at the end; only the newest
    version of each is kept.
    """

    def __init__(self, folder: Path | None = None, memory: int | None = None) -> None:
        self.given, self.memory = folder, memory_for_states() if memory is None else memory
        self.cache: OrderedDict[Key, Blob] = OrderedDict()  # least recently used first
        self.size = 0  # bytes in the cache
        self.written: dict[Key, tuple[str, Place | None]] = {}  # versions on disk, with their SHA-256
        self.rounds: dict[int, list[int]] = {}  # committed versions of each client, newest last
        self.staged: dict[int, int] = {}  # client -> round
        self.unlisted: list[Key] = []  # versions committed since the last `flush`

    @cached_property
    def folder(self) -> Path:
        """Where states are written."""
        if self.given is not None:
            return self.given
        folder = make_owned_folder(Path(tempfile.gettempdir()))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @cached_property
    def segments(self) -> Segments:
        """The files that states are written to."""
        return Segments(self.folder, durable=self.given is not None)

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
        blob = self._read(key)
        if blob:
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
                if self.given is None:
                    self._drop(client, self.rounds[client][:-1])
                else:
                    self.unlisted.append((client, self.rounds[client][-1]))
        self.discard()
        if self.given is None and "segments" in self.__dict__:
            self._compact()
            for _ in range(2):  # there is no checkpoint that could refer to the old places
                self.segments.settle()

    def discard(self) -> None:
        """Drop all staged states."""
        for key in self.staged.items():
            self._forget(key)
        self.staged.clear()

    def flush(self, until: int) -> list[Version]:
        """Write the states committed since the last flush, up to round `until`, to disk.

        Returns their versions, and again those of states that have moved to another place.
        """
        due = [key for key in self.unlisted if key[1] <= until]
        for key in due:
            if key not in self.written:
                self._write(key, self.cache[key])
        waiting = set(self.unlisted)
        moved = [key for key in self._compact() if key not in waiting]
        self.segments.sync()
        self.unlisted = [key for key in self.unlisted if key[1] > until]
        return [Version(*key, *self.written[key]) for key in (*due, *moved)]

    def prune(self, before: int) -> None:
        """Remove versions that no checkpoint of round `before` or later needs. Called after each checkpoint."""
        for client, rounds in self.rounds.items():
            if len(rounds) > 1:
                self._drop(client, [r for r in rounds if r <= before][:-1])
        self.segments.settle()

    def restore(self, versions: Iterable[Version]) -> None:
        """Restore the versions that earlier flushes returned, oldest first. Raises Damaged if a current one is."""
        for client, round, sha, place in versions:
            if (client, round) not in self.written:
                self.rounds.setdefault(client, []).append(round)
            self.written[client, round] = (sha, place)
        for client, rounds in self.rounds.items():
            key = (client, rounds[-1])
            if (sha := self.written[key][0]) and sha256(self._read(key)) != sha:
                raise Damaged(f"the state of client {client} after round {rounds[-1]} is missing or damaged")
        for _, place in self.written.values():
            if place is not None:
                self.segments.claim(place)
        self.segments.retire_unused()

    def _drop(self, client: int, old: Sequence[int]) -> None:
        for round in old:
            self._forget((client, round))
            self.rounds[client].remove(round)

    def _remember(self, key: Key, blob: Blob) -> None:
        self.size += len(blob) - len(self.cache.pop(key, b""))
        self.cache[key] = blob
        while self.size > self.memory and len(self.cache) > 1:
            oldest, spilled = self.cache.popitem(last=False)
            self.size -= len(spilled)
            if oldest not in self.written:
                self._write(oldest, spilled)

    def _forget(self, key: Key) -> None:
        self.size -= len(self.cache.pop(key, b""))
        sha, place = self.written.pop(key, ("", None))
        if place is not None:
            self.segments.release(place)
        elif sha:
            self._old_path(key).unlink(missing_ok=True)

    def _write(self, key: Key, blob: Blob) -> None:
        # checksums are for `restore`, which a temporary folder does not survive to see
        sha = sha256(blob) if blob and self.given is not None else ""
        self.written[key] = (sha, self.segments.append(blob) if blob else None)

    def _read(self, key: Key) -> Blob:
        sha, place = self.written[key]
        if place is not None:
            return self.segments.read(place)
        return self._old_path(key).read_bytes() if sha and self._old_path(key).exists() else b""

    def _compact(self) -> list[Key]:
        """Move what is left in sparse segments to the open one; returns what was moved."""
        sparse = self.segments.sparse()
        moved = [key for key, (_, place) in self.written.items() if place and place.segment in sparse] if sparse else []
        for key in moved:
            self.written[key] = (self.written[key][0], self.segments.append(self._read(key)))
        self.segments.retire(sparse)
        return moved

    def _old_path(self, key: Key) -> Path:
        """The file of one state, in runs of earlier versions."""
        return self.folder / f"{key[0]}.{key[1]}.safetensors"
