"""Files written whole or not at all, and their checksums; temporary folders; how much memory there is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PREFIX = "fedskew-"  # of the names of temporary folders


def write_atomically(path: Path, blob: bytes | bytearray, *, durable: bool = True) -> None:
    """Write a file, whole and on disk when this returns. If it fails, on a full disk say, the old file stays.

    With `durable=False` it may be lost if the machine loses power soon after, but writing takes less time.
    """
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(blob)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sha256(blob: bytes | bytearray) -> str:
    return hashlib.sha256(blob).hexdigest()


def make_owned_folder(base: Path) -> Path:
    """Create a temporary folder in `base` whose name holds the number of this process.

    Also removes such folders of processes that no longer exist: they were killed.
    """
    for folder in base.glob(PREFIX + "*"):
        if _is_orphan(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))


def _is_orphan(folder: Path) -> bool:
    """Whether the process that created the folder no longer exists."""
    owner = folder.name.removeprefix(PREFIX).partition("-")[0]
    if os.name != "posix" or not owner.isdigit():
        return False
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process exists and belongs to another user
        pass
    return False


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less in a container; 0 if that is unknown."""
    if not hasattr(os, "sysconf"):  # not on Windows
        return 0
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(limit.read_text()))
    return max(0, min(sizes))
