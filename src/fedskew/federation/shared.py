"""Memory that processes of one machine share: memory-mapped files in a folder of its own.

Files, because they work with spawned processes on every platform, cannot be larger than what is
free without an error, and can be removed by whoever is left: a worker whose parent was killed
removes the folder.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path

from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.tensors import Payload

PREFIX = "fedskew-"
MEMORY = Path("/dev/shm")  # a file system in memory, where there is one


def make_room(size: int) -> Path:
    """A new folder for shared files, in memory if three times `size` is free there."""
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 3 * size
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY if in_memory else None))


def remove_room(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def create(path: Path, size: int) -> memoryview:
    with path.open("wb") as file:
        file.truncate(max(size, 1))
    return attach(path)


def attach(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


def share(path: Path, payload: Payload) -> Payload:
    """The payload in a shared file; its tensors look into it."""
    size = size_in_bytes(payload)
    buffer = create(path, size)
    encode_into(buffer, payload)
    return decode(buffer[:size])


def open_shared(path: Path) -> Payload:
    return decode(attach(path))
