"""A pool of Ray actors in place of worker processes, on this machine or on all nodes of a cluster.

It performs the same jobs and returns the same results, in the order of the jobs and bit-identical. Ray restarts an
actor that died, repeats its job once, and copies the data to each node once, for all actors there. Ray pickles the
messages between the run and its actors; both are processes of the same user, and no other data goes through it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedskew.core.method import Update
from fedskew.core.settings import UsageError, library
from fedskew.core.tensors import Payload
from fedskew.federation.simulate.jobs import DIED_TWICE, Job, Lost, Result, Trained, die, perform
from fedskew.federation.simulate.window import ATTEMPTS, MAX_WAITING_BYTES, Window
from fedskew.federation.simulate.worker import cores, keep_freed_memory
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode
from fedskew.federation.world import World

Bytes = np.ndarray[Any, Any]  # uint8; Ray passes arrays without a copy


class PackedUpdate(NamedTuple):
    """A `Trained` result in the form in which it is sent through Ray."""

    payload: Bytes
    weight: float
    metrics: dict[str, float]
    state: bytes
    seconds: float


def to_array(payload: Payload) -> Bytes:
    """The encoded payload as an array of bytes."""
    return np.frombuffer(encode(payload), np.uint8)


class RayWorker:
    """The class of the actors. Each performs one job after another in one thread.

    `references` point to the world and to its arrays in Ray's object store. They are part of every call, because an
    actor that Ray restarted has to build its world again.
    """

    world: World | None = None
    current: tuple[int, Payload] = (0, {})  # version of the last broadcast, and it decoded

    def ready(self, references: list[Any]) -> None:
        """Build the world, so that the first job does not have to."""
        self._cached_world(references)

    def _cached_world(self, references: list[Any]) -> World:
        if self.world is None:
            keep_freed_memory()
            torch.set_num_threads(1)
            world, arrays = import_ray().get(references)
            with warnings.catch_warnings():
                # torch warns that Ray's memory is read-only; nothing writes to the arrays of a world
                warnings.simplefilter("ignore")
                self.world = world.with_arrays({name: torch.from_numpy(a) for name, a in arrays.items()})
        return self.world

    def perform_job(
        self, references: list[Any], job: Job, version: int, broadcast: Bytes, state: bytes
    ) -> PackedUpdate | Result:
        """Perform one job. `version` numbers the broadcasts, so that each is decoded once."""
        if job.dies:
            die()
        if self.current[0] != version:
            self.current = (version, decode(broadcast.data))
        result = perform(self._cached_world(references), job, self.current[1], state)
        if not isinstance(result, Trained):
            return result
        update = result.update
        return PackedUpdate(
            to_array(update.payload), update.weight, update.metrics, bytes(result.state_blob()), result.seconds
        )


def unpack(answer: PackedUpdate | Result) -> Result:
    """The result that an actor sent."""
    if not isinstance(answer, PackedUpdate):
        return answer
    update = Update(decode(answer.payload.data), answer.weight, answer.metrics)
    return Trained(update, answer.state, answer.seconds)


def import_ray() -> Any:
    """The package `ray`, with its usage statistics switched off; UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return library("ray", "ray")


def connect(ray: Any, count: int | None) -> int:
    """Connect to the cluster at RAY_ADDRESS, or start Ray on this machine if that is not set.

    Returns the number of actors to start: `count`, or one for each CPU if that is None.
    """
    address = os.environ.get("RAY_ADDRESS", "local")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address == "local":
            count = count or cores()
            ray.init("local", num_cpus=count, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            _check_reachable(address)
            ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"Ray at RAY_ADDRESS={address} cannot be used: {str(error).splitlines()[0]}") from None
    else:
        ray._private.worker._worker_logs_enabled = False  # otherwise Ray prints every actor's death to stdout
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray installs its own handler; ours saves the run
    return count or cpus(ray)


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at host:port. Ray itself would retry for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def cpus(ray: Any) -> int:
    """The number of CPUs in the cluster."""
    return int(ray.cluster_resources().get("CPU", 0))


class Actors:
    """A pool of Ray actors with the interface of `Workers`.

    `count` is the number of actors, one CPU each; None starts as many as the cluster has CPUs. `close` shuts Ray
    down, unless Ray was already initialized in this process.
    """

    def __init__(self, world: World, count: int | None) -> None:
        if world.device != "cpu":
            raise UsageError(f"Ray actors run on CPUs only, but the device is {world.device}: use --device cpu.")
        self.ray, self.world, self.count = import_ray(), world, count
        self.was_initialized = self.ray.is_initialized()
        self.workers: list[Any] = []
        self.idle: list[Any] = []
        self.references: list[Any] = []  # to the world and its arrays, see `RayWorker`
        self.running: dict[Any, tuple[Any, int]] = {}  # Ray's reference to a result -> (actor, index of the job)
        self.broadcasts = 0

    def start(self) -> None:
        """Connect to Ray and start the actors."""
        ray, world = self.ray, self.world
        count = (self.count or cpus(ray)) if self.was_initialized else connect(ray, self.count)
        if not 0 < count <= cpus(ray):
            raise UsageError(f"--workers {count} is invalid: Ray has {cpus(ray)} CPUs; expected 1 to {cpus(ray)}.")
        try:
            self.references = [ray.put(world.without_arrays())]
        except TypeError as error:
            raise UsageError(f"the method or the model cannot be sent to Ray's actors ({error}).") from None
        self.references.append(ray.put({name: t.contiguous().numpy() for name, t in world.arrays().items()}))
        kind = ray.remote(RayWorker).options(num_cpus=1, max_restarts=-1, max_task_retries=ATTEMPTS - 1)
        self.workers = [kind.remote() for _ in range(count)]
        try:
            ray.get([actor.ready.remote(self.references) for actor in self.workers])
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"Ray's actors cannot start: {error}") from error
        self.idle = list(self.workers)

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Perform the jobs; yields results in the order of the jobs. `state(client)` is a client's state, or b""."""
        while self.running:  # jobs of a round that was abandoned
            self._collect()
        blob = to_array(broadcast)
        self.broadcasts += 1
        versioned = (self.broadcasts, self.ray.put(blob))
        window = Window(jobs, max(2 * len(self.workers), MAX_WAITING_BYTES // max(len(blob), 1)))
        results: dict[int, Result] = {}
        for done in range(len(jobs)):
            window.advance(done)
            while done not in results:
                while self.idle and window:
                    index = window.take()
                    self._hand_out(jobs[index], index, versioned, state)
                index, result = self._collect()
                results[index] = result
            yield results.pop(done)

    def _hand_out(self, job: Job, index: int, versioned: tuple[int, Any], state: Callable[[int], Blob]) -> None:
        """Give a job to an idle actor. `versioned` is the broadcast: (version, Ray's reference)."""
        actor = self.idle.pop()
        blob = bytes(state(job.item)) if job.needs_state else b""
        self.running[actor.perform_job.remote(self.references, job, *versioned, blob)] = (actor, index)

    def _collect(self) -> tuple[int, Result]:
        """Wait for the next result; returns (index of the job, result)."""
        (first, *_), _ = self.ray.wait(list(self.running), num_returns=1)
        actor, index = self.running.pop(first)
        self.idle.append(actor)
        try:
            return index, unpack(self.ray.get(first))
        except self.ray.exceptions.RayTaskError:  # an error in our own code, which did not end the process
            raise
        except self.ray.exceptions.RayError:
            return index, Lost(DIED_TWICE)

    def close(self) -> None:
        """End the actors, and Ray unless it was initialized before."""
        for actor in self.workers:
            self.ray.kill(actor)
        self.workers, self.idle, self.running = [], [], {}
        if not self.was_initialized:
            self.ray.shutdown()
