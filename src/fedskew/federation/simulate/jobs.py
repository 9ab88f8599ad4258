"""The work of one client, or one piece of the test set, as a job: what goes to a worker, and what comes back."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedskew.core.method import Update
from fedskew.core.tensors import Payload
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.federation.simulate.faults import Kind, spoilt
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode
from fedskew.federation.world import World

log = logging.getLogger("fedskew")


@dataclass(frozen=True)
class Job:
    """One piece of work. `item` is a client, or for "evaluate_global" a piece of the test set."""

    kind: Literal["train", "evaluate_client", "evaluate_global"]
    round: int
    stage: str
    item: int
    weight: int = 0  # how much work it is: the largest goes first
    trained: bool = False  # evaluate_client: whether this client ever trained
    fault: Kind | None = None  # a fault to simulate

    @property
    def needs_state(self) -> bool:
        """Whether the client's state is part of the job."""
        return self.kind != "evaluate_global"


class Lost(NamedTuple):
    """A job without a result, and why."""

    why: str


class Trained(NamedTuple):
    """A finished training job: the update, the client's new state as bytes, and how long it took."""

    update: Update
    state: Blob
    seconds: float


Result = Trained | ClientScore | Score | Lost


def perform(world: World, job: Job, broadcast: Payload, state: Blob) -> Result:
    """Do a job in this process. An error at a client loses that client's work, not the round."""
    if job.kind == "evaluate_global":
        return world.evaluate_global(job.item, job.round, broadcast)
    try:
        if job.kind == "evaluate_client":
            return world.evaluate_client(job.item, job.round, broadcast, decode_state(state), job.trained)
        if job.fault == "raise":
            raise RuntimeError("a simulated fault")
        done = world.train_client(job.item, job.round, job.stage, broadcast, decode_state(state))
    except Exception as error:
        log.info("client %d failed in round %d", job.item, job.round, exc_info=True)
        return Lost(f"failed: {type(error).__name__}: {error}")
    update = done.update if job.fault not in ("nan", "inf", "shape") else spoilt(done.update, job.fault)
    return Trained(update, encode(done.state) if done.state else b"", done.seconds)


def decode_state(state: Blob) -> Payload:
    """A client's state; empty bytes are a client without one."""
    return decode(state) if state else {}


def die() -> None:
    """End this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
