"""Jobs and their results: training or evaluating one client, or evaluating one chunk of the test set."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedskew.core.method import Update
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.tensors import Payload
from fedskew.evaluation.scores import ClientScore, Score, Together
from fedskew.federation.simulate.faults import KINDS, Fault, spoiled
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode
from fedskew.federation.world import World

log = logging.getLogger("fedskew")
DIED_TWICE = "crashed its worker process twice"  # why a client is left out whose job ended two processes


@dataclass(frozen=True)
class Job:
    """One job.

    `item` is the number of a client; for "evaluate_global" that of a chunk of the test set; for "evaluate_together"
    that of the first of `clients`.
    """

    kind: Literal["train", "evaluate_client", "validate_client", "evaluate_together", "evaluate_global"]
    round: int
    stage: str
    item: int
    weight: int = 0  # how much work it is, in samples; large jobs start first
    trained: bool = False  # for evaluate_client and validate_client: whether this client ever trained
    fault: Fault | None = None  # a fault to simulate; None: none
    clients: tuple[int, ...] = ()  # for evaluate_together: the clients

    @property
    def needs_state(self) -> bool:
        """Whether the job needs the client's state."""
        return self.kind in ("train", "evaluate_client", "validate_client")

    @property
    def dies(self) -> bool:
        """Whether the process that performs the job is to be killed."""
        return self.fault is not None and self.fault.kind == "die"


class Lost(NamedTuple):
    """The result of a job that failed, with the reason."""

    why: str


class Trained(NamedTuple):
    """The result of a training job: the update, the client's new state, and the time it took."""

    update: Update
    state: Payload | Blob  # from a worker process as bytes
    seconds: float

    def state_blob(self) -> Blob:
        """The client's new state as bytes; b"" if it is empty."""
        if isinstance(self.state, dict):
            return encode(self.state) if self.state else b""
        return self.state


Result = Trained | ClientScore | Together | Score | Lost


def perform(world: World, job: Job, broadcast: Payload, state: Blob | memoryview) -> Result:
    """Perform a job in this process. `state` is the client's state as bytes; b"" is a client without state.

    An error in a client's job gives `Lost`, so that the round continues without this client.
    """
    if job.kind == "evaluate_global":
        return world.evaluate_global(job.item, job.round, broadcast)
    try:
        if job.kind == "evaluate_together":
            return world.evaluate_together(job.clients, job.round, broadcast)
        if job.kind in ("evaluate_client", "validate_client"):
            validation = job.kind == "validate_client"
            return world.evaluate_client(
                job.item, job.round, broadcast, decode_state(state), job.trained, validation=validation
            )
        kind = job.fault.kind if job.fault is not None else ""
        if kind == "raise":
            raise RuntimeError("a simulated fault")
        flip = kind == "labels"
        done = world.train_client(job.item, job.round, job.stage, broadcast, decode_state(state), flip_labels=flip)
    except Exception as error:
        log.info("client %d failed in round %d", job.item, job.round, exc_info=True)
        return Lost(f"failed: {type(error).__name__}: {error}")
    update = done.update
    if job.fault is not None:
        key = (world.seed, Purpose.FAULT, job.item + 1, job.round, KINDS.index(job.fault.kind), 1)
        update = spoiled(update, job.fault, broadcast, seeded(*key))
    return Trained(update, done.state, done.seconds)


def decode_state(state: Blob | memoryview) -> Payload:
    """A client's state from bytes; b"" gives an empty state."""
    return decode(state) if state else {}


def die() -> None:
    """End this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
