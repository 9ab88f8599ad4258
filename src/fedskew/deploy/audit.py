"""A site's record of what left it: one line of JSON for every reply to a server, in `audit.jsonl` beside its states."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedskew.deploy.messages import Answer, as_header
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode_with_notes, size_of

FILE = "audit.jsonl"


class Audit:
    """Appends to the record of a site. A reply is recorded before it is sent, so that none leaves unrecorded."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def record(self, server: str, kind: str, answer: Answer, payload: Blob) -> None:
        """Record a reply: when, to which server, for which run and round, and the bytes by group of tensors.

        `told` is what else is in it: numbers about the data and the training, in full.
        """
        empty = as_header(Answer())
        told = {field: value for field, value in as_header(answer).items() if value != empty.get(field)}
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "server": server,
            "kind": kind,
            "run": answer.run,
            "round": answer.round,
            "bytes": len(payload),
            "groups": _groups(payload),
            "told": {field: value for field, value in told.items() if field not in ("run", "round", "name")},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read(1) not in (b"", b"\n")  # a line that a full disk or a kill cut off
            file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _groups(payload: Blob) -> dict[str, int]:
    """Bytes by group of tensors; those of anything else under the name "unknown"."""
    try:
        return size_of(decode_with_notes(payload)[0]) if payload else {}
    except ValueError:
        return {"unknown": len(payload)}
