"""Messages as frames, a JSON header and bytes: over a pipe, and inside Flower's records."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

LENGTHS = struct.Struct("<IQ")  # lengths of the header and of the bytes
LONGEST_HEADER = 16 << 20  # characters of a header from another machine
SMALL = 1 << 20  # bytes that are sent with the header
SPILL = 1 << 20  # bytes; more than that goes to a file, if there is a folder for it
Header = dict[str, Any]
Frame = tuple[Header, bytes | Path]  # the bytes, or the file that has them


def write_frame(stream: IO[bytes], header: Header, blob: bytes | bytearray | memoryview = b"") -> None:
    """Write one frame to a stream and flush it."""
    text = json.dumps(header).encode()
    stream.write(LENGTHS.pack(len(text), len(blob)) + text)
    stream.write(blob)
    stream.flush()


def read_frame(stream: IO[bytes], spool: Path | None = None) -> Frame | None:
    """The next frame of a stream; None at its end, also in the middle of a frame.

    With `spool`, more than `SPILL` bytes are written to a file in that folder, and its path is returned.
    """
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header, blob = LENGTHS.unpack(lengths)
    text = stream.read(header)
    if len(text) < header:
        return None
    if spool is not None and blob > SPILL:
        path = _spill(stream, blob, spool)
        return None if path is None else (json.loads(text), path)
    data = stream.read(blob)
    return (json.loads(text), data) if len(data) == blob else None


def _spill(stream: IO[bytes], size: int, folder: Path) -> Path | None:
    """Copy `size` bytes of a stream to a new file; None if the stream ends before."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "wb") as file:
        while size:
            data = stream.read(min(size, SPILL))
            if not data:
                return None
            file.write(data)
            size -= len(data)
    return Path(name)


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
        frame = read_frame(self.input)
        assert frame is None or isinstance(frame[1], bytes)
        return frame  # type: ignore[return-value]


def body_record(blob: bytes) -> Any:
    """Bytes as Flower's record of one array, which it sends in chunks; a few bytes as they are.

    Messages that share a record share its chunks and their checksums, which take most of the time.
    """
    from flwr.app import Array, ArrayRecord

    if len(blob) <= SMALL:
        return bytes(blob)
    return ArrayRecord({"blob": Array("uint8", (len(blob),), "bytes", blob)})


def as_records(header: Header, body: Any) -> Any:
    """A frame as Flower's records: the header as text, and what `body_record` gave for its bytes.

    A few bytes are sent with the header: every record is a request of its own.
    """
    from flwr.app import ConfigRecord, RecordDict

    text = json.dumps(header)
    if isinstance(body, bytes):
        return RecordDict({"header": ConfigRecord({"json": text, "blob": body})})
    return RecordDict({"header": ConfigRecord({"json": text}), "body": body})


def from_records(records: Any) -> tuple[Header, bytes]:
    """The frame in Flower's records; ValueError if they do not contain one. The bytes are not checked."""
    try:
        text = records["header"]["json"]
        if len(text) > LONGEST_HEADER:
            raise ValueError(f"the header has {len(text)} characters, at most {LONGEST_HEADER} are allowed")
        header = json.loads(text)
        blob = records["body"]["blob"].data if "body" in records else records["header"].get("blob", b"")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the message contains no frame: {error}") from None
    if not isinstance(header, dict) or not isinstance(blob, bytes):
        raise ValueError("the message contains no frame")
    return header, blob
