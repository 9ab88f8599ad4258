"""Files written whole or not at all, and their checksums."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "fedskew-"  # of the names of temporary folders


def write_atomically(path: Path, blob: bytes | bytearray) -> None:
    """The whole file or none of it, on disk when this returns."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


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
