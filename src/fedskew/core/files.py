"""Files written whole or not at all, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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
