"""Clients on Ray: actors in place of worker processes, on this machine or on all nodes of a cluster.

The same jobs, the same results in order of the jobs, the same bits. Ray itself restarts an actor that
died, gives its job once more, and moves data between nodes, all actors of a node looking into one copy.
Ray pickles what the run and its actors say to each other: both are the same user's processes, and
nothing from anywhere else goes through it.
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
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, die, perform
from fedskew.federation.simulate.window import HELD, TRIES, Window
from fedskew.federation.simulate.worker import cores, keep_freed_memory
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode
from fedskew.federation.world import World

Bytes = np.ndarray[Any, Any]  # of uint8: Ray passes arrays without a copy


class Packed(NamedTuple):
    """A `Trained` on its way."""

    payload: Bytes
    weight: float
    metrics: dict[str, float]
    state: bytes
    seconds: float


def packed(payload: Payload) -> Bytes:
    return np.frombuffer(encode(payload), np.uint8)


class Hand:
    """What an actor is: a world built once, one thread, one job after another."""

    world: World | None = None
    current: tuple[int, Payload] = (0, {})

    def ready(self, given: list[Any]) -> None:
        self._built(given)

    def _built(self, given: list[Any]) -> World:
        """The world, built where it is not. `given` says where in Ray's memory it and its arrays lie."""
        if self.world is None:
            keep_freed_memory()
            torch.set_num_threads(1)
            world, arrays = package().get(given)
            with warnings.catch_warnings():
                # Ray's memory is read-only and torch says so; nothing writes into a world's arrays
                warnings.simplefilter("ignore")
                self.world = world.with_arrays({name: torch.from_numpy(a) for name, a in arrays.items()})
        return self.world

    def do(self, given: list[Any], job: Job, version: int, broadcast: Bytes, state: bytes) -> Packed | Result:
        if job.fault == "die":
            die()
        if self.current[0] != version:
            self.current = (version, decode(broadcast.data))
        result = perform(self._built(given), job, self.current[1], state)
        if not isinstance(result, Trained):
            return result
        update = result.update
        return Packed(packed(update.payload), update.weight, update.metrics, bytes(result.state), result.seconds)


def unpacked(answer: Packed | Result) -> Result:
    if not isinstance(answer, Packed):
        return answer
    update = Update(decode(answer.payload.data), answer.weight, answer.metrics)
    return Trained(update, answer.state, answer.seconds)


def package() -> Any:
    """Ray, which tells nobody that it is used."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return library("ray", "ray")


def connect(ray: Any, count: int | None) -> int:
    """The cluster at RAY_ADDRESS if that is set, else a Ray of our own on loopback; the actors to start."""
    address = os.environ.get("RAY_ADDRESS", "local")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address == "local":
            count = count or cores()
            ray.init("local", num_cpus=count, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            _knock(address)
            ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"Ray at RAY_ADDRESS={address} cannot be used: {str(error).splitlines()[0]}") from None
    else:
        ray._private.worker._worker_logs_enabled = False  # or Ray tells stdout of every actor that died
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ours, which saves the run; Ray puts its own there
    return count or cpus(ray)


def _knock(address: str) -> None:
    """Whether somebody answers at host:port: Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def cpus(ray: Any) -> int:
    return int(ray.cluster_resources().get("CPU", 0))


class Actors:
    """A pool of Ray actors, used as `Workers` is. `close` ends the Ray it began, not one it found begun."""

    def __init__(self, world: World, count: int | None) -> None:
        """`count`: actors, one CPU each; None for all that the cluster has."""
        if world.device != "cpu":
            raise UsageError(f"Ray's actors work on CPUs, this run is to use {world.device}: say --device cpu.")
        self.ray, self.world, self.count = package(), world, count
        self.joined = self.ray.is_initialized()
        self.workers: list[Any] = []
        self.idle: list[Any] = []
        self.given: list[Any] = []  # what an actor builds its world from, also one that Ray restarted
        self.doing: dict[Any, tuple[Any, int]] = {}  # a result to be -> (who makes it, the job's place)
        self.versions = 0

    def start(self) -> None:
        ray, world = self.ray, self.world
        count = (self.count or cpus(ray)) if self.joined else connect(ray, self.count)
        if not 0 < count <= cpus(ray):
            raise UsageError(f"{count} workers are asked for, and Ray has {cpus(ray)} CPUs: give --workers up to that.")
        try:
            self.given = [ray.put(world.with_arrays({name: t[:0] for name, t in world.arrays().items()}))]
        except TypeError as error:
            raise UsageError(f"the method or the model cannot be sent to Ray's actors ({error}).") from None
        self.given.append(ray.put({name: t.contiguous().numpy() for name, t in world.arrays().items()}))
        kind = ray.remote(Hand).options(num_cpus=1, max_restarts=-1, max_task_retries=TRIES - 1)
        self.workers = [kind.remote() for _ in range(count)]
        try:
            ray.get([actor.ready.remote(self.given) for actor in self.workers])
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"Ray's actors cannot start: {error}") from error
        self.idle = list(self.workers)

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Results in the order of the jobs. `state(item)` is what a client's job is given of its own."""
        while self.doing:  # a round that was given up
            self._collect()
        blob = packed(broadcast)
        self.versions += 1
        which = (self.versions, self.ray.put(blob))
        window = Window(jobs, max(2 * len(self.workers), HELD // max(len(blob), 1)))
        results: dict[int, Result] = {}
        for out in range(len(jobs)):
            window.open_until(out)
            while out not in results:
                while self.idle and window:
                    place = window.take()
                    self._hand_out(jobs[place], place, which, state)
                place, result = self._collect()
                results[place] = result
            yield results.pop(out)

    def _hand_out(self, job: Job, place: int, which: tuple[int, Any], state: Callable[[int], Blob]) -> None:
        actor = self.idle.pop()
        kept = bytes(state(job.item)) if job.needs_state else b""
        self.doing[actor.do.remote(self.given, job, *which, kept)] = (actor, place)

    def _collect(self) -> tuple[int, Result]:
        """The next result that comes, and the place of its job."""
        (first, *_), _ = self.ray.wait(list(self.doing), num_returns=1)
        actor, place = self.doing.pop(first)
        self.idle.append(actor)
        try:
            return place, unpacked(self.ray.get(first))
        except self.ray.exceptions.RayTaskError:  # our own code failed, not its process
            raise
        except self.ray.exceptions.RayError:
            return place, Lost("its process died twice")

    def close(self) -> None:
        for actor in self.workers:
            self.ray.kill(actor)
        self.workers, self.idle, self.doing = [], [], {}
        if not self.joined:
            self.ray.shutdown()
