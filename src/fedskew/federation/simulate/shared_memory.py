"""Memory that processes of one machine share: memory-mapped files in a folder of its own.

Files, because they work with spawned processes on every platform, cannot be larger than what is
free without an error, and can be removed by whoever is left: a worker whose parent was killed
removes the folder.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

from fedskew.core.tensors import Payload
from fedskew.federation.wire import decode, encode_into, size_in_bytes

PREFIX = "fedskew-"
MEMORY = Path("/dev/shm")  # a file system in memory, where there is one


def make_room(size: int) -> Path:
    """A new folder for shared files, in memory if three times `size` is free there."""
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 3 * size
    base = MEMORY if in_memory else Path(tempfile.gettempdir())
    for room in base.glob(PREFIX + "*"):
        if _is_orphan(room):
            remove_room(room)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))


def _is_orphan(room: Path) -> bool:
    """Whether the process that made the room is gone: it and its workers were all killed at once."""
    owner = room.name.removeprefix(PREFIX).partition("-")[0]
    if os.name != "posix" or not owner.isdigit():
        return False
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and somebody else's
        pass
    return False


def remove_room(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def create(path: Path, size: int) -> memoryview:
    with path.open("wb") as file:
        file.truncate(max(size, 1))
    return attach(path)


def attach(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class Drawer:
    """Shared files of one writer, one a slot, replaced by a larger one when something does not fit."""

    def __init__(self, room: Path, name: str) -> None:
        self.room, self.name, self.made = room, name, 0
        self.files: dict[int, tuple[str, memoryview]] = {}

    def of(self, slot: int, size: int) -> tuple[str, memoryview]:
        """The slot's file, by name and as memory of at least `size` bytes."""
        if slot not in self.files or len(self.files[slot][1]) < size:
            if slot in self.files:
                (self.room / self.files[slot][0]).unlink(missing_ok=True)
            self.made += 1
            name = f"{self.name}-{self.made}"
            self.files[slot] = (name, create(self.room / name, size + size // 4))
        return self.files[slot]


class Reader:
    """Other writers' shared files by name, each mapped once."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.files: dict[str, memoryview] = {}

    def bytes(self, name: str, size: int) -> bytearray:
        """A copy of the first `size` bytes: the file may be written again from here on."""
        if name not in self.files:
            self.files[name] = attach(self.room / name)
        return bytearray(self.files[name][:size])


def share(path: Path, payload: Payload) -> Payload:
    """The payload in a shared file; its tensors look into it."""
    size = size_in_bytes(payload)
    buffer = create(path, size)
    encode_into(buffer, payload)
    return decode(buffer[:size])


def open_shared(path: Path) -> Payload:
    return decode(attach(path))
