"""Frames over a pipe: a JSON header and bytes. And what Flower's records and a frame have in common."""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import IO, Any

LENGTHS = struct.Struct("<IQ")  # of the header and of the bytes
Header = dict[str, Any]


def write_frame(stream: IO[bytes], header: Header, blob: bytes | bytearray | memoryview = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(LENGTHS.pack(len(text), len(blob)) + text)
    stream.write(blob)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[Header, bytes] | None:
    """The next frame; None where the pipe ends."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header, blob = LENGTHS.unpack(lengths)
    text, data = stream.read(header), stream.read(blob)
    return (json.loads(text), data) if len(text) == header and len(data) == blob else None


class Pipe:
    """This process's way to the one that started it. Whatever else is printed goes to stderr, the log."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "wb")
        self.inward = os.fdopen(os.dup(0), "rb")
        os.dup2(2, 1)
        self.lock = threading.Lock()

    def tell(self, header: Header, blob: bytes = b"") -> None:
        with self.lock:
            write_frame(self.out, header, blob)

    def hear(self) -> tuple[Header, bytes] | None:
        return read_frame(self.inward)


def as_records(header: Header, blob: bytes) -> Any:
    """A frame as Flower carries it: the header as text, the bytes as one array, which Flower cuts into chunks."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    records = RecordDict({"header": ConfigRecord({"json": json.dumps(header)})})
    if blob:
        records["body"] = ArrayRecord({"blob": Array("uint8", (len(blob),), "bytes", blob)})
    return records


def from_records(records: Any) -> tuple[Header, bytes]:
    """The frame in a message; ValueError if it holds none. The bytes are handed on as they are."""
    try:
        header = json.loads(records["header"]["json"])
        blob = records["body"]["blob"].data if "body" in records else b""
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it holds no frame: {error}") from None
    if not isinstance(header, dict) or not isinstance(blob, bytes):
        raise ValueError("it holds no frame")
    return header, blob
