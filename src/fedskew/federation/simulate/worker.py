"""A worker process: one thread, one net for all its clients, results in memory that it shares with its parent."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedskew.core.tensors import Payload
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, die, perform
from fedskew.federation.simulate.shared_memory import Drawer, Reader, attach, open_shared, remove_room
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.world import World


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back: a training step frees and takes the same blocks again."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def frame(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


def unframe(message: bytes) -> dict[str, Any]:
    return dict(json.loads(message))


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
            header = unframe(pipe.recv_bytes())
            job = Job(**header["job"])
            if job.fault == "die":
                die()
            broadcast = desk.broadcast(header["broadcast"])
            result = perform(world, job, broadcast, desk.state(header["state"]))
            pipe.send_bytes(desk.answer(result, header["slot"]))
    except (EOFError, BrokenPipeError, ConnectionError):
        # the parent is gone; if it was killed, nobody else will tidy up
        if not (room / "closing").exists():
            remove_room(room)


class Desk:
    """Where a worker reads what it is given and writes what it made."""

    def __init__(self, room: Path, me: int) -> None:
        self.room = room
        self.given, self.results = Reader(room), Drawer(room, f"result-{me}")
        self.current: tuple[list[Any], Payload] = ([], {})

    def broadcast(self, which: list[Any]) -> Payload:
        """The round's broadcast, decoded once."""
        if self.current[0] != which:
            name, size, _ = which
            self.current = (which, decode(attach(self.room / name)[:size]))
        return self.current[1]

    def state(self, which: list[Any] | None) -> Blob:
        return self.given.bytes(*which) if which else b""

    def answer(self, result: Result, slot: int) -> bytes:
        if not isinstance(result, Trained):
            return frame({"kind": type(result).__name__, "fields": _plain(result)})
        update, state = result.update, result.state
        size = size_in_bytes(update.payload)
        name, buffer = self.results.of(slot, size + len(state))
        encode_into(buffer, update.payload)
        buffer[size : size + len(state)] = state
        about = {"weight": update.weight, "metrics": update.metrics, "seconds": result.seconds}
        return frame({"kind": "Trained", "file": name, "sizes": [size, len(state)], **about})


def _plain(result: ClientScore | Score | Lost) -> dict[str, Any]:
    return result._asdict() if isinstance(result, Lost) else dataclasses.asdict(result)
