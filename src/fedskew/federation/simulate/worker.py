"""The main loop of a worker process: one thread, one net for all clients, results in memory shared with the parent."""

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
from fedskew.federation.simulate.shared_memory import (
    SharedReader,
    SlotFiles,
    map_file,
    open_shared,
    remove_shared_folder,
)
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.world import World


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse: every training step allocates and frees the same blocks."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def to_json(header: dict[str, Any]) -> bytes:
    """A message between parent and worker as bytes."""
    return json.dumps(header).encode()


def from_json(message: bytes) -> dict[str, Any]:
    """The inverse of `to_json`."""
    return dict(json.loads(message))


def serve(pipe: Connection, world: World, folder: Path, number: int) -> None:
    """Run a worker process: receive a job over `pipe`, perform it, send the result; end when the pipe is closed.

    `world` comes without its arrays; they and all results are in the shared `folder`. `number` identifies this
    worker among those of the pool.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    keep_freed_memory()
    torch.set_num_threads(1)
    world = world.with_arrays(open_shared(folder / "world")["arrays"])
    world.initial  # noqa: B018  cached before the first job
    files = WorkerFiles(folder, number)
    try:
        pipe.send_bytes(to_json({"ready": True}))
        while True:
            header = from_json(pipe.recv_bytes())
            job = Job(**header["job"])
            if job.fault == "die":
                die()
            broadcast = files.read_broadcast(header["broadcast"])
            result = perform(world, job, broadcast, files.read_state(header["state"]))
            pipe.send_bytes(files.write_result(result, header["slot"]))
    except (EOFError, BrokenPipeError, ConnectionError):
        # The parent is gone. Unless it is closing down and removes the folder itself, it was killed.
        if not (folder / "closing").exists():
            remove_shared_folder(folder)


class WorkerFiles:
    """The shared files as one worker uses them: it reads broadcasts and client states, and writes results."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.states, self.results = SharedReader(folder), SlotFiles(folder, f"result-{number}")
        self.current: tuple[list[Any], Payload] = ([], {})  # the last broadcast: its reference, and it decoded

    def read_broadcast(self, reference: list[Any]) -> Payload:
        """The broadcast at [file name, bytes, version]; decoded once, then cached until the reference changes."""
        if self.current[0] != reference:
            name, size, _ = reference
            self.current = (reference, decode(map_file(self.folder / name)[:size]))
        return self.current[1]

    def read_state(self, reference: list[Any] | None) -> Blob:
        """The client state at [file name, bytes]; None is a client without state, and gives b""."""
        return self.states.read(*reference) if reference else b""

    def write_result(self, result: Result, slot: int) -> bytes:
        """Write an update and the client's new state to the slot's file; returns the message for the parent.

        Other results are small, and are part of the message itself.
        """
        if not isinstance(result, Trained):
            return to_json({"kind": type(result).__name__, "fields": _plain(result)})
        update, state = result.update, result.state
        size = size_in_bytes(update.payload)
        name, buffer = self.results.of(slot, size + len(state))
        encode_into(buffer, update.payload)
        buffer[size : size + len(state)] = state
        about = {"weight": update.weight, "metrics": update.metrics, "seconds": result.seconds}
        return to_json({"kind": "Trained", "file": name, "sizes": [size, len(state)], **about})


def _plain(result: ClientScore | Score | Lost) -> dict[str, Any]:
    return result._asdict() if isinstance(result, Lost) else dataclasses.asdict(result)
