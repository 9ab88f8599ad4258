"""The main loop of a worker process: one thread, one net for all clients, results in memory shared with the parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fedskew.core.tensors import Payload
from fedskew.evaluation.bins import Predictions
from fedskew.evaluation.counts import Counts
from fedskew.evaluation.scores import ClientScore, Score, Together
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

KINDS = (torch.float32, torch.int64, torch.int64)  # of the tensors of `Predictions`


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse: every training step allocates and frees the same blocks."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; glibc before 2.35 has a limit
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pack(header: dict[str, Any]) -> bytes:
    """A message between parent and worker as bytes (MessagePack)."""
    return msgspec.msgpack.encode(header)


def unpack(message: bytes) -> dict[str, Any]:
    """The inverse of `pack`."""
    return dict(msgspec.msgpack.decode(message))


def aligned(size: int) -> int:
    """Where the state begins in a result's file, after an update of so many bytes."""
    return -(-size // 8) * 8


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
    gc.freeze()  # what exists now lives as long as the process: garbage collection need not look at it again
    try:
        pipe.send_bytes(pack({"ready": True}))
        while True:
            header = unpack(pipe.recv_bytes())
            job = msgspec.convert(header["job"], Job)
            if job.dies:
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

    def read_state(self, reference: list[Any] | None) -> Blob | memoryview:
        """The client state at [file name, bytes]; None is a client without state, and gives b"".

        It is not copied: the parent leaves it as it is until it has the result.
        """
        return self.states.view(*reference) if reference else b""

    def write_result(self, result: Result, slot: int) -> bytes:
        """Write an update and the client's new state to the slot's file; returns the message for the parent.

        Other results are small, and are part of the message itself.
        """
        if not isinstance(result, Trained):
            return pack({"kind": type(result).__name__, "fields": plain_result(result)})
        update, state = result.update, result.state
        assert isinstance(state, dict)
        size, state_size = size_in_bytes(update.payload), size_in_bytes(state) if state else 0
        start = aligned(size)
        name, buffer = self.results.of(slot, start + state_size)
        encode_into(buffer, update.payload)
        if state:
            encode_into(buffer[start : start + state_size], state)
        about = {"weight": update.weight, "metrics": update.metrics, "seconds": result.seconds}
        return pack({"kind": "Trained", "file": name, "sizes": [size, state_size], **about})


def plain_result(result: ClientScore | Together | Score | Lost) -> dict[str, Any]:
    """A result that is small enough for the message itself, as plain values; `read_result` is the inverse."""
    if isinstance(result, Lost):
        return result._asdict()
    if isinstance(result, Score):
        return plain_score(result)
    if isinstance(result, Together):
        assert result.made is not None
        arrays = [tensor.numpy().tobytes() for tensor in result.made]
        return {"made": arrays, "sizes": result.sizes, "losses": result.losses}
    return {
        "client": result.client,
        "shared": result.shared and plain_score(result.shared),
        "personal": None if result.personal is result.shared else plain_score(result.personal),
        "fallback": result.fallback,
    }


def plain_score(score: Score) -> dict[str, Any]:
    """A score with its predictions as plain values."""
    made = score.made
    if isinstance(made, Predictions):
        arrays = [tensor.numpy().tobytes() for tensor in made]
    else:
        arrays = [] if made is None else [array.tobytes() for array in made.arrays]
    return {"correct": score.correct, "total": score.total, "loss": score.loss, "made": arrays}


def read_score(fields: dict[str, Any]) -> Score:
    """The inverse of `plain_score`."""
    correct, total, arrays = tuple(fields["correct"]), tuple(fields["total"]), fields["made"]
    made: Counts | Predictions | None = None
    if len(arrays) == len(Predictions._fields):
        made = read_predictions(arrays)
    elif arrays:
        a, b, c, d, e = (np.frombuffer(array, np.int64) for array in arrays)
        made = Counts(len(total), (a, b), (c, d), e.reshape(3, -1))
    return Score(correct, total, fields["loss"], made)


def read_predictions(arrays: list[bytes]) -> Predictions:
    """Predictions from the bytes of their tensors."""
    log_p, y, predicted = (torch.frombuffer(bytearray(a), dtype=t) for a, t in zip(arrays, KINDS, strict=True))
    return Predictions(log_p.view(len(y), -1), y, predicted)


def read_result(kind: str, fields: dict[str, Any]) -> ClientScore | Together | Score | Lost:
    """The inverse of `plain_result`; `kind` is the name of its class."""
    if kind == "Lost":
        return Lost(**fields)
    if kind == "Score":
        return read_score(fields)
    if kind == "Together":
        return Together(read_predictions(fields["made"]), fields["sizes"], fields["losses"])
    shared = fields["shared"] and read_score(fields["shared"])
    personal = shared if fields["personal"] is None else read_score(fields["personal"])
    return ClientScore(fields["client"], shared, personal, fields["fallback"])
