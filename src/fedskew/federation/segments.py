"""Many small blobs in few large files: blobs are appended to segments, and segments are compacted.

A segment is `<folder>/<number>.segment`: blobs one after the other, nothing else. Where each blob is, its owner
remembers. Nothing is ever overwritten; a new process starts a new segment, so what a killed one left half-written is
never touched again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

SEGMENT_BYTES = 64 << 20  # a segment is full from this size on
SPARSE = 0.5  # share of a segment's bytes in use below which its blobs are moved


class Place(NamedTuple):
    """Where a blob is."""

    segment: int
    offset: int
    size: int


class Segments:
    """The segments in a folder, which is made on first use.

    full: bytes from which on a new segment is begun. durable: whether `sync` writes to disk; False for a temporary
    folder, which need not survive a crash.
    """

    def __init__(self, folder: Path, full: int = SEGMENT_BYTES, *, durable: bool = True) -> None:
        self.folder, self.full, self.durable = folder, full, durable
        self.in_use: dict[int, int] = {}  # segment -> bytes of its blobs that are still in use
        self.file: BinaryIO | None = None  # the segment that is appended to
        self.number = max((_number(path) for path in folder.glob("*.segment")), default=-1)
        self.retiring: set[int] = set()  # segments whose blobs were moved since the last `settle`
        self.retired: set[int] = set()  # likewise, between the last two calls of `settle`

    def append(self, blob: bytes | bytearray) -> Place:
        """Write a blob; it is on disk after `sync`."""
        if self.file is None or self.file.tell() >= self.full:
            self.sync()
            self.close()
            self.number += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path(self.number).open("xb", buffering=0)
        place = Place(self.number, self.file.tell(), len(blob))
        view = memoryview(blob)
        while len(view):
            view = view[self.file.write(view) :]
        self.claim(place)
        return place

    def claim(self, place: Place) -> None:
        """Count a blob that an earlier process wrote as in use."""
        self.in_use[place.segment] = self.in_use.get(place.segment, 0) + place.size

    def read(self, place: Place) -> bytes:
        """A blob; shorter than it was, or empty, if its segment is damaged or missing."""
        try:
            with self.path(place.segment).open("rb", buffering=0) as file:
                file.seek(place.offset)
                return file.read(place.size)
        except FileNotFoundError:
            return b""

    def release(self, place: Place) -> None:
        """A blob is not needed any more. A segment without any is removed."""
        if place.segment in self.in_use:
            self.in_use[place.segment] -= place.size
            self._remove_unused([place.segment])

    def sparse(self) -> set[int]:
        """Full segments of which less than half is in use: their blobs should be moved by `append`."""
        return {
            segment
            for segment, used in self.in_use.items()
            if segment not in self._kept and used < SPARSE * self._bytes(segment)
        }

    def retire(self, segments: Iterable[int]) -> None:
        """Nothing in these segments is needed any more, except by checkpoints: they go at the second `settle`."""
        self.retiring |= set(segments)

    def retire_unused(self) -> None:
        """Retire the segments in the folder of which nothing is in use."""
        found = {_number(path) for path in self.folder.glob("*.segment")}
        self.retire(found - self.in_use.keys() - {-1, self._open})

    def settle(self) -> None:
        """A checkpoint was written that refers to nothing retired: remove what was retired before the last one."""
        gone, self.retired, self.retiring = self.retired, self.retiring, set()
        for segment in gone:
            self.in_use[segment] = 0
        self._remove_unused(gone)

    def sync(self) -> None:
        """Everything appended so far is on disk when this returns, if the segments are durable."""
        if self.file is not None and self.durable:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the open segment; the next `append` begins another."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder / f"{segment:06d}.segment"

    @property
    def _open(self) -> int:
        return self.number if self.file is not None else -1

    @property
    def _kept(self) -> set[int]:
        return {self._open} | self.retiring | self.retired

    def _bytes(self, segment: int) -> int:
        path = self.path(segment)
        return path.stat().st_size if path.exists() else 0

    def _remove_unused(self, segments: Iterable[int]) -> None:
        for segment in segments:
            if self.in_use[segment] <= 0 and segment not in self._kept:
                del self.in_use[segment]
                self.path(segment).unlink(missing_ok=True)


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else -1
