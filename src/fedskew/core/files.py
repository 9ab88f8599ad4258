"""Files written whole or not at all, and their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, blob: bytes | bytearray) -> None:
    """Write a file, whole and on disk when this returns. If it fails, on a full disk say, the old file stays."""
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sha256(blob: bytes | bytearray) -> str:
    return hashlib.sha256(blob).hexdigest()
