"""Worker processes: started once, one thread each, data shared, results streamed back in order of the jobs.

A worker is sent small messages over a pipe and writes results into files of its own that both sides
map; what it holds of a round (the broadcast) is decoded once. Nothing is pickled but the world it
is started with.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from fedskew.evaluate import ClientScore, Score
from fedskew.federation.jobs import Job, Lost, Result, Trained, perform
from fedskew.federation.shared import attach, create, make_room, remove_room, share
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.worker import frame, serve, unframe
from fedskew.federation.world import World
from fedskew.method import Update
from fedskew.tensors import Payload, Tensors

DEPTH = 2  # jobs a worker has at a time: the next one waits in its pipe
HELD = 256 << 20  # bytes of updates that may wait for their turn
STARTS = 3  # processes in a row that may die before they are up
TRIES = 2  # a job that twice killed its worker is given up


def _score(fields: dict[str, Any]) -> Score:
    return Score(tuple(fields["correct"]), tuple(fields["total"]), fields["loss"])


@dataclass
class Worker:
    number: int
    process: Any
    pipe: Connection
    ready: bool = False
    slots: list[int] = field(default_factory=lambda: list(range(DEPTH)))  # free ones
    doing: list[tuple[int, int]] = field(default_factory=list)  # (job's place, slot), in order


class Workers:
    """A pool of worker processes. `close` it, or use it in a `with`."""

    def __init__(self, world: World, count: int, *, patient: bool = True) -> None:
        """`patient`: wait for workers to come up; otherwise the caller's process works until they have."""
        self.count, self.patient = count, patient
        payload: Payload = {"arrays": Tensors({k: v.contiguous() for k, v in world.arrays().items()})}
        self.room = make_room(size_in_bytes(payload))
        self.world = world.with_arrays(share(self.room / "world", payload)["arrays"])
        # what a worker is sent must not hold the arrays themselves
        self.light = world.with_arrays({name: t[:0] for name, t in world.arrays().items()})
        self.workers: list[Worker] = []
        self.files: dict[str, memoryview] = {}
        self.spread: tuple[str, memoryview] = ("", memoryview(b""))
        self.versions = self.born = self.stillborn = 0
        self.performed = {"here": 0, "workers": 0}

    def start(self) -> None:
        while len(self.workers) < self.count:
            self.workers.append(self._spawn())

    def _spawn(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self.born += 1
        arguments = (theirs, self.light, self.room, self.born)
        process = context.Process(target=serve, args=arguments, daemon=True, name=f"fedskew-{self.born}")
        process.start()
        theirs.close()
        return Worker(self.born, process, mine)

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Results in the order of the jobs. `state(item)` is what a client's job is given of its own."""
        self._drain()
        which = self._publish(broadcast)
        window = max(2 * DEPTH * self.count, HELD // max(which[1], 1))
        results: dict[int, Result] = {}
        waiting, tries, out = list(range(len(jobs))), [0] * len(jobs), 0
        while out < len(jobs):
            for place, result in self._collect(0, waiting, tries):
                results[place] = result
            self._hand_out(jobs, waiting, out + window, which, state)
            if out in results:
                yield results.pop(out)
                out += 1
            elif any(w.doing for w in self.workers):
                for place, result in self._collect(1.0, waiting, tries):
                    results[place] = result
            elif not self.patient and not any(w.ready for w in self.workers):
                place = waiting.pop(0)
                results[place] = self._here(jobs[place], broadcast, state)
            else:
                self._collect_ready()

    def _here(self, job: Job, broadcast: Payload, state: Callable[[int], Blob]) -> Result:
        self.performed["here"] += 1
        if job.fault == "die":
            return Lost("its process died twice")
        return perform(self.world, job, broadcast, state(job.item))

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

    def _hand_out(
        self, jobs: Sequence[Job], waiting: list[int], end: int, which: list[Any], state: Callable[[int], Blob]
    ) -> None:
        """Give free workers the largest job of the window; the least busy worker first."""
        free = [w for w in self.workers if w.ready and w.slots]
        while free and waiting and waiting[0] < end:
            worker = min(free, key=lambda w: len(w.doing))
            place = max((p for p in waiting if p < end), key=lambda p: (jobs[p].weight, -p))
            job = jobs[place]
            slot = worker.slots[0]
            header = {"job": dataclasses.asdict(job), "slot": slot, "broadcast": which}
            try:
                worker.pipe.send_bytes(frame(header, state(job.item) if job.kind != "examine" else b""))
            except (BrokenPipeError, ConnectionError):
                free.remove(worker)  # dead: `_collect` replaces it
                continue
            waiting.remove(place)
            worker.slots.remove(slot)
            worker.doing.append((place, slot))
            free = [w for w in free if w.slots]

    def _collect(self, seconds: float, waiting: list[int], tries: list[int]) -> list[tuple[int, Result]]:
        """What has come back by now; waits up to `seconds` for something. Dead workers are replaced."""
        found: list[tuple[int, Result]] = []
        for pipe in wait([w.pipe for w in self.workers], seconds):
            worker = next(w for w in self.workers if w.pipe is pipe)
            try:
                header, _ = unframe(worker.pipe.recv_bytes())
            except (EOFError, ConnectionError):
                found += self._replace(worker, waiting, tries)
                continue
            if "ready" in header:
                worker.ready, self.stillborn = True, 0
                continue
            place, slot = worker.doing.pop(0)
            found.append((place, self._result(header)))
            worker.slots.append(slot)
            self.performed["workers"] += 1
        return found

    def _collect_ready(self) -> None:
        """No worker is up yet and nothing is under way: wait for the first to report."""
        self._collect(1.0, [], [])

    def _replace(self, worker: Worker, waiting: list[int], tries: list[int]) -> list[tuple[int, Result]]:
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
                waiting.append(place)
        waiting.sort()
        return given_up

    def _result(self, header: dict[str, Any]) -> Result:
        kind = header["kind"]
        if kind == "Trained":
            name, (size, kept) = header["file"], header["sizes"]
            if name not in self.files:
                self.files[name] = attach(self.room / name)
            blob = bytearray(self.files[name][: size + kept])  # the slot is free from here on
            payload = decode(memoryview(blob)[:size])
            update = Update(payload, header["weight"], header["metrics"])
            return Trained(update, blob[size:], header["seconds"])
        fields = header["fields"]
        if kind == "ClientScore":
            shared = fields["shared"] and _score(fields["shared"])
            return ClientScore(fields["client"], shared, _score(fields["personal"]), fields["fallback"])
        return _score(fields) if kind == "Score" else Lost(**fields)

    def _drain(self) -> None:
        """A round that was given up leaves jobs under way; their results are not wanted."""
        while any(w.doing for w in self.workers):
            lost: list[int] = []
            self._collect(1.0, lost, [0] * (1 + max(p for w in self.workers for p, _ in w.doing)))

    def close(self) -> None:
        (self.room / "closing").touch()
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
