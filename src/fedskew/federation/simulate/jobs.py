"""The work of one client (or one piece of the test set) as a job: what goes to a worker, and what comes back."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import NamedTuple

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
    kind: str  # train | judge | examine
    round: int
    stage: str
    item: int  # a client, or a piece of the test set
    weight: int = 0  # how much work it is: the largest goes first
    trained: bool = False  # judge: whether this client ever trained
    fault: Kind | None = None


class Lost(NamedTuple):
    """A job without a result, and why."""

    why: str


class Trained(NamedTuple):
    update: Update
    state: Blob
    seconds: float


Result = Trained | ClientScore | Score | Lost


def perform(world: World, job: Job, broadcast: Payload, state: Blob) -> Result:
    """Do a job here. What goes wrong at a client is that client's loss, not the round's."""
    kept = decode(state) if state else {}
    if job.kind == "examine":
        return world.examine(job.item, job.round, broadcast)
    try:
        if job.kind == "judge":
            return world.judge(job.item, job.round, broadcast, kept, job.trained)
        if job.fault == "raise":
            raise RuntimeError("a fault that was asked for")
        done = world.work(job.item, job.round, job.stage, broadcast, kept)
    except Exception as error:
        log.info("client %d failed in round %d", job.item, job.round, exc_info=True)
        return Lost(f"failed: {type(error).__name__}: {error}")
    update = done.update if job.fault not in ("nan", "inf", "shape") else spoilt(done.update, job.fault)
    return Trained(update, encode(done.state) if done.state else b"", done.seconds)


def die() -> None:
    """End this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
