"""Worker processes: started once, one thread each, data shared, results streamed back in order of the jobs.

A worker gets small messages over a pipe and writes results into its own files, which both sides map into memory.
The broadcast of a round is decoded once per worker. Nothing is pickled but the world a worker starts with.
"""

from __future__ import annotations

import multiprocessing
import pickle
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, perform
from fedskew.federation.simulate.shared_memory import Drawer, Reader, create, make_room, remove_room, share
from fedskew.federation.simulate.window import HELD, TRIES, Window
from fedskew.federation.simulate.worker import frame, serve, unframe
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.world import World

DEPTH = 6  # jobs a worker has at a time: the next ones wait in its pipe
NAP = 0.05  # seconds at most that results of small clients may gather before they are dealt with
STARTS = 3  # processes in a row that may die before they are up


def _score(fields: dict[str, Any]) -> Score:
    return Score(tuple(fields["correct"]), tuple(fields["total"]), fields["loss"])


@dataclass
class Worker:
    number: int
    process: Any
    pipe: Connection
    slots: list[int]  # free ones
    states: Drawer  # what its jobs are given of their clients' own
    doing: list[tuple[int, int]] = field(default_factory=list)  # (job's place, slot), in order
    ready: bool = False


class Workers:
    """A pool of worker processes."""

    def __init__(self, world: World, count: int, *, patient: bool = True) -> None:
        """`patient`: wait for workers to come up; otherwise the caller's process works until they have."""
        self.count, self.patient = count, patient
        payload: Payload = {"arrays": Tensors({k: v.contiguous() for k, v in world.arrays().items()})}
        self.room = make_room(size_in_bytes(payload))
        self.world = world.with_arrays(share(self.room / "world", payload)["arrays"])
        # what a worker is sent must not hold the arrays themselves
        self.light = world.with_arrays({name: t[:0] for name, t in world.arrays().items()})
        self.workers: list[Worker] = []
        self.results = Reader(self.room)
        self.spread: tuple[str, memoryview] = ("", memoryview(b""))
        self.watched: tuple[selectors.BaseSelector, list[Connection]] = (selectors.DefaultSelector(), [])
        self.versions = self.born = self.stillborn = 0
        self.performed = {"here": 0, "workers": 0}
        self.usual = 0.0  # seconds a client takes, lately

    def start(self) -> None:
        while len(self.workers) < self.count:
            self.workers.append(self._spawn())

    def _spawn(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self.born += 1
        arguments = (theirs, self.light, self.room, self.born)
        process = context.Process(target=serve, args=arguments, daemon=True, name=f"fedskew-{self.born}")
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the method or the model cannot be sent to worker processes ({error}): "
                "define it at the top level of a module, or use one worker."
            ) from None
        theirs.close()
        return Worker(self.born, process, mine, list(range(DEPTH)), Drawer(self.room, f"state-{self.born}"))

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Results in the order of the jobs. `state(item)` is what a client's job is given of its own."""
        self._drain()
        which = self._publish(broadcast)
        held = HELD // max(which[1], 1)  # updates that may wait for their turn
        window, depth = Window(jobs, max(4 * self.count, held)), DEPTH if held >= DEPTH * self.count else 2
        results: dict[int, Result] = {}
        tries, out = [0] * len(jobs), 0
        while out < len(jobs):
            self._hand_out(window, depth, which, state)
            if out in results:
                yield results.pop(out)
                out += 1
                window.open_until(out)
                results.update(self._collect(0, window, tries))
            elif self.patient or any(w.doing or w.ready for w in self.workers):
                results.update(self._collect(1.0, window, tries))
                if window and all(len(w.doing) > DEPTH // 2 for w in self.workers):
                    # several small results at a time, while the memory they need is still in the cache
                    time.sleep(min(NAP, self.usual * DEPTH / 2))
                    results.update(self._collect(0, window, tries))
            else:
                place = window.take()
                results[place] = self._here(jobs[place], broadcast, state)
                results.update(self._collect(0, window, tries))

    def _here(self, job: Job, broadcast: Payload, state: Callable[[int], Blob]) -> Result:
        self.performed["here"] += 1
        if job.fault == "die":
            return Lost("its process died twice")
        return perform(self.world, job, broadcast, state(job.item) if job.needs_state else b"")

    def _publish(self, broadcast: Payload) -> list[Any]:
        """The broadcast in a shared file: [name, bytes, version]."""
        size = size_in_bytes(broadcast)
        self.versions += 1
        if len(self.spread[1]) < size:
            if self.spread[0]:
                (self.room / self.spread[0]).unlink(missing_ok=True)
            name = f"broadcast-{self.versions}"
            self.spread = (name, create(self.room / name, size + size // 4))
        encode_into(self.spread[1], broadcast)
        return [self.spread[0], size, self.versions]

    def _hand_out(self, window: Window, depth: int, which: list[Any], state: Callable[[int], Blob]) -> None:
        """Give workers up to `depth` jobs each, the least busy worker first."""
        free = [w for w in self.workers if w.ready and len(w.doing) < depth]
        while free and window:
            worker = min(free, key=lambda w: len(w.doing))
            place = window.take()
            job = window.jobs[place]
            slot = worker.slots[0]
            kept = state(job.item) if job.needs_state else b""
            header = {"job": vars(job), "slot": slot, "broadcast": which, "state": None}
            if kept:
                name, buffer = worker.states.of(slot, len(kept))
                buffer[: len(kept)] = kept
                header["state"] = [name, len(kept)]
            try:
                worker.pipe.send_bytes(frame(header))
            except (BrokenPipeError, ConnectionError):
                window.give_back(place)
                free.remove(worker)  # dead: `_collect` replaces it
                continue
            worker.slots.remove(slot)
            worker.doing.append((place, slot))
            free = [w for w in free if len(w.doing) < depth]

    def _collect(self, seconds: float, window: Window, tries: list[int]) -> list[tuple[int, Result]]:
        """What has come back by now; waits up to `seconds` for something. Dead workers are replaced."""
        found: list[tuple[int, Result]] = []
        while pipes := self._waited(seconds):
            seconds = 0
            for pipe in pipes:
                worker = next(w for w in self.workers if w.pipe is pipe)
                try:
                    header = unframe(worker.pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    found += self._replace(worker, window, tries)
                    continue
                if "ready" in header:
                    worker.ready, self.stillborn = True, 0
                    continue
                place, slot = worker.doing.pop(0)
                found.append((place, self._result(header)))
                worker.slots.append(slot)
                self.performed["workers"] += 1
        return found

    def _waited(self, seconds: float) -> list[Any]:
        """The pipes that have something to say. A selector that is kept is ten times quicker than `wait`."""
        if sys.platform == "win32":
            return wait([w.pipe for w in self.workers], seconds)
        pipes = [w.pipe for w in self.workers]
        if pipes != self.watched[1]:
            self.watched[0].close()
            self.watched = (selectors.DefaultSelector(), pipes)
            for pipe in pipes:
                self.watched[0].register(pipe, selectors.EVENT_READ)
        return [key.fileobj for key, _ in self.watched[0].select(seconds)]

    def _replace(self, worker: Worker, window: Window, tries: list[int]) -> list[tuple[int, Result]]:
        """A worker died: the job it was at is tried once more, those behind it wait again."""
        worker.process.join()
        self.stillborn += not worker.ready
        if self.stillborn > STARTS:
            raise RuntimeError(f"worker processes cannot start (exit code {worker.process.exitcode})")
        self.workers[self.workers.index(worker)] = self._spawn()
        given_up: list[tuple[int, Result]] = []
        for n, (place, _) in enumerate(worker.doing):
            tries[place] += n == 0
            if tries[place] >= TRIES:
                given_up.append((place, Lost("its process died twice")))
            else:
                window.give_back(place)
        return given_up

    def _result(self, header: dict[str, Any]) -> Result:
        kind = header["kind"]
        if kind == "Trained":
            size, kept = header["sizes"]
            blob = self.results.bytes(header["file"], size + kept)
            self.usual = 0.9 * self.usual + 0.1 * header["seconds"]
            payload = decode(memoryview(blob)[:size])
            update = Update(payload, header["weight"], header["metrics"])
            return Trained(update, blob[size:], header["seconds"])
        fields = header["fields"]
        if kind == "ClientScore":
            shared = fields["shared"] and _score(fields["shared"])
            return ClientScore(fields["client"], shared, _score(fields["personal"]), fields["fallback"])
        return _score(fields) if kind == "Score" else Lost(**fields)

    def _drain(self) -> None:
        """A round that was abandoned leaves jobs under way: wait for them and drop their results."""
        while any(w.doing for w in self.workers):
            jobs = [Job("evaluate_global", 0, "", 0)] * (1 + max(p for w in self.workers for p, _ in w.doing))
            self._collect(1.0, Window(jobs, 0), [0] * len(jobs))

    def close(self) -> None:
        (self.room / "closing").touch()
        self.watched[0].close()
        for worker in self.workers:
            worker.pipe.close()
        deadline = time.monotonic() + 2
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers = []
        remove_room(self.room)
