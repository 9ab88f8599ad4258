"""Memory shared by the processes of one simulation: memory-mapped files in a temporary folder.

Files work with spawned processes on every platform, fail with an error when there is no space left, and can be
removed by any process: a worker whose parent was killed removes the folder.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path

from fedskew.core.files import make_owned_folder
from fedskew.core.tensors import Payload
from fedskew.federation.wire import decode, encode_into, size_in_bytes

MEMORY = Path("/dev/shm")  # a file system in memory; not on every platform


def make_shared_folder(size: int) -> Path:
    """Create a folder for shared files: in memory if three times `size` bytes are free there, else on disk.

    Also removes folders of earlier runs whose processes were all killed.
    """
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 3 * size
    base = MEMORY if in_memory else Path(tempfile.gettempdir())
    return make_owned_folder(base)


def remove_shared_folder(folder: Path) -> None:
    """Remove the folder with its files; nothing happens if it does not exist."""
    shutil.rmtree(folder, ignore_errors=True)


def create_file(path: Path, size: int) -> memoryview:
    """Create a file of `size` bytes (at least 1) and map it into memory, readable and writable."""
    with path.open("wb") as file:
        file.truncate(max(size, 1))
    return map_file(path)


def map_file(path: Path) -> memoryview:
    """Map an existing file into memory, readable and writable."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


class SlotFiles:
    """The shared files of one writer, one for each slot. A file that is too small is replaced by a larger one."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.created = folder, name, 0
        self.files: dict[int, tuple[str, memoryview]] = {}

    def of(self, slot: int, size: int) -> tuple[str, memoryview]:
        """(file name, memory of at least `size` bytes) of a slot."""
        if slot not in self.files or len(self.files[slot][1]) < size:
            if slot in self.files:
                (self.folder / self.files[slot][0]).unlink(missing_ok=True)
            self.created += 1
            name = f"{self.name}-{self.created}"
            self.files[slot] = (name, create_file(self.folder / name, size + size // 4))
        return self.files[slot]


class SharedReader:
    """Reads files written by other processes, by name. Each file is mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, memoryview] = {}

    def read(self, name: str, size: int, start: int = 0) -> bytearray:
        """A copy of `size` bytes of a file from `start` on. Afterwards the writer may overwrite the file."""
        return bytearray(self.view(name, size, start))

    def view(self, name: str, size: int, start: int = 0) -> memoryview:
        """`size` bytes of a file from `start` on, as they are in the file."""
        if name not in self.files:
            self.files[name] = map_file(self.folder / name)
        return self.files[name][start : start + size]


def share(path: Path, payload: Payload) -> Payload:
    """Write the payload to a shared file; returns it with tensors that are views into that file."""
    size = size_in_bytes(payload)
    buffer = create_file(path, size)
    encode_into(buffer, payload)
    return decode(buffer[:size])


def open_shared(path: Path) -> Payload:
    """The payload that `share` wrote to `path`, with tensors that are views into the file."""
    return decode(map_file(path))
