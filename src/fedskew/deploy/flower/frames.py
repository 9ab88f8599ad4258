"""Messages as frames, a JSON header and bytes: over a pipe, and inside Flower's records."""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import IO, Any

LENGTHS = struct.Struct("<IQ")  # lengths of the header and of the bytes
Header = dict[str, Any]


def write_frame(stream: IO[bytes], header: Header, blob: bytes | bytearray | memoryview = b"") -> None:
    """Write one frame to a stream and flush it."""
    text = json.dumps(header).encode()
    stream.write(LENGTHS.pack(len(text), len(blob)) + text)
    stream.write(blob)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[Header, bytes] | None:
    """The next frame of a stream; None at its end, also in the middle of a frame."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header, blob = LENGTHS.unpack(lengths)
    text, data = stream.read(header), stream.read(blob)
    return (json.loads(text), data) if len(text) == header and len(data) == blob else None


class Pipe:
    """The connection of a Flower process to the fedskew process that started it: frames over stdin and stdout.

    Everything else that is printed to stdout goes to stderr, which is the log.
    """

    def __init__(self) -> None:
        self.output = os.fdopen(os.dup(1), "wb")
        self.input = os.fdopen(os.dup(0), "rb")
        os.dup2(2, 1)
        self.lock = threading.Lock()

    def send(self, header: Header, blob: bytes = b"") -> None:
        """Send one message; may be called from several threads."""
        with self.lock:
            write_frame(self.output, header, blob)

    def receive(self) -> tuple[Header, bytes] | None:
        """Wait for the next message; None if the other process has ended."""
        return read_frame(self.input)


def as_records(header: Header, blob: bytes) -> Any:
    """A frame as Flower's records: the header as text, the bytes as one array, which Flower sends in chunks."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    records = RecordDict({"header": ConfigRecord({"json": json.dumps(header)})})
    if blob:
        records["body"] = ArrayRecord({"blob": Array("uint8", (len(blob),), "bytes", blob)})
    return records


def from_records(records: Any) -> tuple[Header, bytes]:
    """The frame in Flower's records; ValueError if they do not contain one. The bytes are not checked."""
    try:
        header = json.loads(records["header"]["json"])
        blob = records["body"]["blob"].data if "body" in records else b""
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the message contains no frame: {error}") from None
    if not isinstance(header, dict) or not isinstance(blob, bytes):
        raise ValueError("the message contains no frame")
    return header, blob
