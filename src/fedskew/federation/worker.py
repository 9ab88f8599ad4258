"""A worker process: one thread, one net for all its clients, results in memory that it shares with its parent."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedskew.evaluate import ClientScore, Score
from fedskew.federation.jobs import Job, Lost, Result, Trained, die, perform
from fedskew.federation.shared import attach, create, open_shared, remove_room
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.world import World
from fedskew.tensors import Payload


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back: a training step frees and takes the same blocks again."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def frame(header: dict[str, Any], blob: Blob = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + text + blob


def unframe(message: bytes) -> tuple[dict[str, Any], bytes]:
    end = 4 + int.from_bytes(message[:4], "little")
    return json.loads(message[4:end]), message[end:]


def serve(pipe: Connection, world: World, room: Path, me: int) -> None:
    """A worker's life: read a job, do it, answer; end when the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    keep_freed_memory()
    torch.set_num_threads(1)
    world = world.with_arrays(open_shared(room / "world")["arrays"])
    world.initial  # noqa: B018  built before the first job
    desk = Desk(room, me)
    try:
        pipe.send_bytes(frame({"ready": True}))
        while True:
            header, state = unframe(pipe.recv_bytes())
            job = Job(**header["job"])
            if job.fault == "die":
                die()
            broadcast = desk.broadcast(header["broadcast"])
            result = perform(world, job, broadcast, state)
            pipe.send_bytes(desk.answer(result, header["slot"]))
    except (EOFError, BrokenPipeError, ConnectionError):
        # the parent is gone; if it was killed, nobody else will tidy up
        if not (room / "closing").exists():
            remove_room(room)


class Desk:
    """A worker's own shared files: one a slot, made larger when a result needs it."""

    def __init__(self, room: Path, me: int) -> None:
        self.room, self.me = room, me
        self.files: dict[int, tuple[str, memoryview]] = {}
        self.made = 0
        self.current: tuple[list[Any], Payload] = ([], {})

    def broadcast(self, which: list[Any]) -> Payload:
        """The round's broadcast, decoded once."""
        if self.current[0] != which:
            name, size, _ = which
            self.current = (which, decode(attach(self.room / name)[:size]))
        return self.current[1]

    def answer(self, result: Result, slot: int) -> bytes:
        if not isinstance(result, Trained):
            return frame({"kind": type(result).__name__, "fields": _plain(result)})
        update, state = result.update, result.state
        size = size_in_bytes(update.payload)
        name, buffer = self._file(slot, size + len(state))
        encode_into(buffer, update.payload)
        buffer[size : size + len(state)] = state
        about = {"weight": update.weight, "metrics": update.metrics, "seconds": result.seconds}
        return frame({"kind": "Trained", "file": name, "sizes": [size, len(state)], **about})

    def _file(self, slot: int, size: int) -> tuple[str, memoryview]:
        if slot not in self.files or len(self.files[slot][1]) < size:
            if slot in self.files:
                (self.room / self.files[slot][0]).unlink(missing_ok=True)
            self.made += 1
            name = f"result-{self.me}-{self.made}"
            self.files[slot] = (name, create(self.room / name, size + size // 4))
        return self.files[slot]


def _plain(result: ClientScore | Score | Lost) -> dict[str, Any]:
    return result._asdict() if isinstance(result, Lost) else dataclasses.asdict(result)
