"""A pool of worker processes, one thread each, that share the data and return results in the order of the jobs.

Parent and worker exchange small messages over a pipe. Broadcasts, client states and updates are in files that
both sides map into memory. Each worker decodes the broadcast of a round once. Only the `World` that a worker starts
with is pickled.
"""

from __future__ import annotations

import multiprocessing
import pickle
import selectors
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.simulate.jobs import DIED_TWICE, Job, Lost, Result, Trained, perform
from fedskew.federation.simulate.shared_memory import (
    SharedReader,
    SlotFiles,
    create_file,
    make_shared_folder,
    remove_shared_folder,
    share,
)
from fedskew.federation.simulate.window import ATTEMPTS, MAX_WAITING_BYTES, Window
from fedskew.federation.simulate.worker import aligned, keep_freed_memory, pack, read_result, serve, unpack
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, encode_into, size_in_bytes
from fedskew.federation.world import World

DEPTH = 6  # jobs a worker holds at a time: one running, the others waiting in its pipe
LENT = 3 * DEPTH  # updates of a worker that are read where it wrote them, at a time
MAX_NAP = 0.05  # seconds: the longest pause that lets results of small clients accumulate
MAX_FAILED_STARTS = 3  # worker processes in a row that may die before they are ready


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C; processes started inside ignore it from their first moment.

    A terminal sends it to the workers, too, and each that is still importing would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Worker:
    """A worker process as the parent sees it."""

    number: int
    process: Any
    pipe: Connection
    slots: list[int]  # result slots that are free
    states: SlotFiles  # client states that are sent along with jobs
    running: list[tuple[int, int]] = field(default_factory=list)  # (index of the job, slot), in order of submission
    ready: bool = False  # whether it has finished starting
    lent: int = 0  # result slots whose update is still in use


class Workers:
    """A pool of `count` worker processes; `start` starts them, `close` ends them.

    `wait_for_start` True waits until workers are ready; False performs jobs in the calling process meanwhile.
    """

    def __init__(self, world: World, count: int, *, wait_for_start: bool = True) -> None:
        self.count, self.wait_for_start = count, wait_for_start
        payload: Payload = {"arrays": Tensors({k: v.contiguous() for k, v in world.arrays().items()})}
        self.folder = make_shared_folder(size_in_bytes(payload))
        self.world = replace(world.with_arrays(share(self.folder / "world", payload)["arrays"]), cores=count)
        self.empty_world = world.without_arrays()  # pickled for every worker
        keep_freed_memory()  # client states come and go
        self.workers: list[Worker] = []
        self.results = SharedReader(self.folder)
        self.broadcast_file: tuple[str, memoryview] = ("", memoryview(b""))
        self.watched: tuple[selectors.BaseSelector, list[Connection]] = (selectors.DefaultSelector(), [])
        self.broadcasts = self.spawned = self.failed_starts = 0
        self.performed = {"here": 0, "workers": 0}  # jobs by where they were performed
        self.recent_seconds = 0.0  # moving average of the time a client takes

    def start(self) -> None:
        """Start the worker processes that are not running yet."""
        while len(self.workers) < self.count:
            self.workers.append(self._spawn())

    def _spawn(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self.spawned += 1
        number = self.spawned
        arguments = (theirs, self.empty_world, self.folder, number)
        process = context.Process(target=serve, args=arguments, daemon=True, name=f"fedskew-{number}")
        try:
            with without_interrupts():
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the method or the model cannot be sent to worker processes ({error}): "
                "define it at the top level of a module, or use one worker."
            ) from None
        theirs.close()
        states = SlotFiles(self.folder, f"state-{number}")
        return Worker(number, process, mine, list(range(LENT + DEPTH)), states)

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Perform the jobs; yields results in the order of the jobs. `state(client)` is a client's state, or b""."""
        self._drain()
        reference = self._publish(broadcast)
        waiting = MAX_WAITING_BYTES // max(reference[1], 1)  # updates that fit
        window, depth = Window(jobs, max(4 * self.count, waiting)), DEPTH if waiting >= DEPTH * self.count else 2
        results: dict[int, Result] = {}
        attempts, done = [0] * len(jobs), 0
        while done < len(jobs):
            self._hand_out(window, depth, reference, state)
            if done in results:
                yield results.pop(done)
                done += 1
                window.advance(done)
                results.update(self._collect(0, window, attempts))
            elif self.wait_for_start or any(w.running or w.ready for w in self.workers):
                results.update(self._collect(1.0, window, attempts))
                if window and all(len(w.running) > DEPTH // 2 for w in self.workers):
                    # handle several small results at a time, while the memory they need is still in the cache
                    time.sleep(min(MAX_NAP, self.recent_seconds * DEPTH / 2))
                    results.update(self._collect(0, window, attempts))
            else:
                index = window.take()
                results[index] = self._perform_here(jobs[index], broadcast, state)
                results.update(self._collect(0, window, attempts))

    def _perform_here(self, job: Job, broadcast: Payload, state: Callable[[int], Blob]) -> Result:
        self.performed["here"] += 1
        if job.dies:
            return Lost(DIED_TWICE)
        return perform(self.world, job, broadcast, state(job.item) if job.needs_state else b"")

    def _publish(self, broadcast: Payload) -> list[Any]:
        """Write the broadcast to a shared file; returns a reference to it: [file name, bytes, version]."""
        size = size_in_bytes(broadcast)
        self.broadcasts += 1
        if len(self.broadcast_file[1]) < size:
            if self.broadcast_file[0]:
                (self.folder / self.broadcast_file[0]).unlink(missing_ok=True)
            name = f"broadcast-{self.broadcasts}"
            self.broadcast_file = (name, create_file(self.folder / name, size + size // 4))
        encode_into(self.broadcast_file[1], broadcast)
        return [self.broadcast_file[0], size, self.broadcasts]

    def _hand_out(self, window: Window, depth: int, reference: list[Any], state: Callable[[int], Blob]) -> None:
        """Give workers up to `depth` jobs each, the least busy worker first."""
        free = [w for w in self.workers if w.ready and len(w.running) < depth]
        while free and window:
            worker = min(free, key=lambda w: len(w.running))
            index = window.take()
            job = window.jobs[index]
            slot = worker.slots[-1]
            blob = state(job.item) if job.needs_state else b""
            header = {"job": vars(job), "slot": slot, "broadcast": reference, "state": None}
            if blob:
                name, buffer = worker.states.of(slot, len(blob))
                buffer[: len(blob)] = blob
                header["state"] = [name, len(blob)]
            try:
                worker.pipe.send_bytes(pack(header))
            except (BrokenPipeError, ConnectionError):
                window.give_back(index)
                free.remove(worker)  # it died; `_collect` replaces it
                continue
            worker.slots.remove(slot)
            worker.running.append((index, slot))
            free = [w for w in free if len(w.running) < depth]

    def _collect(self, seconds: float, window: Window, attempts: list[int]) -> list[tuple[int, Result]]:
        """(index of the job, result) of all results available; waits up to `seconds` for the first one.

        Workers that died are replaced.
        """
        collected: list[tuple[int, Result]] = []
        while pipes := self._readable(seconds):
            seconds = 0
            for pipe in pipes:
                worker = next(w for w in self.workers if w.pipe is pipe)
                try:
                    header = unpack(worker.pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    collected += self._replace(worker, window, attempts)
                    continue
                if "ready" in header:
                    worker.ready, self.failed_starts = True, 0
                    continue
                index, slot = worker.running.pop(0)
                collected.append((index, self._result(header, worker, slot)))
                self.performed["workers"] += 1
        return collected

    def _readable(self, seconds: float) -> list[Any]:
        """The pipes with data to read, after at most `seconds`. Reusing a selector is ten times faster than `wait`."""
        if sys.platform == "win32":
            return wait([w.pipe for w in self.workers], seconds)
        pipes = [w.pipe for w in self.workers]
        if pipes != self.watched[1]:
            self.watched[0].close()
            self.watched = (selectors.DefaultSelector(), pipes)
            for pipe in pipes:
                self.watched[0].register(pipe, selectors.EVENT_READ)
        return [key.fileobj for key, _ in self.watched[0].select(seconds)]

    def _replace(self, worker: Worker, window: Window, attempts: list[int]) -> list[tuple[int, Result]]:
        """Replace a worker that died. The job it was running gets one more attempt; the others wait again.

        Returns (index of the job, `Lost`) if that was the last attempt.
        """
        worker.process.join()
        self.failed_starts += not worker.ready
        if self.failed_starts > MAX_FAILED_STARTS:
            raise RuntimeError(f"worker processes cannot start (exit code {worker.process.exitcode})")
        self.workers[self.workers.index(worker)] = self._spawn()
        given_up: list[tuple[int, Result]] = []
        for n, (index, _) in enumerate(worker.running):
            attempts[index] += n == 0
            if attempts[index] >= ATTEMPTS:
                given_up.append((index, Lost(DIED_TWICE)))
            else:
                window.give_back(index)
        return given_up

    def _result(self, header: dict[str, Any], worker: Worker, slot: int) -> Result:
        """The result in a worker's message (see `WorkerFiles.write_result`). The slot becomes free, now or later."""
        kind = header["kind"]
        if kind == "Trained":
            size, state_size = header["sizes"]
            self.recent_seconds = 0.9 * self.recent_seconds + 0.1 * header["seconds"]
            payload = self._update(header["file"], size, worker, slot)
            update = Update(payload, header["weight"], header["metrics"])
            return Trained(update, self.results.read(header["file"], state_size, aligned(size)), header["seconds"])
        worker.slots.append(slot)
        return read_result(kind, header["fields"])

    def _update(self, name: str, size: int, worker: Worker, slot: int) -> Payload:
        """The update in a slot's file: as it is there, and the slot is free when nobody uses it any more.

        If so many slots are lent that the worker could run out of them, it is copied, and the slot is free at once.
        """
        if worker.lent >= LENT:
            worker.slots.append(slot)
            return decode(self.results.read(name, size))

        def give_back() -> None:
            worker.lent -= 1
            worker.slots.append(slot)

        worker.lent += 1
        view = self.results.view(name, size)
        weakref.finalize(view, give_back).atexit = False
        return decode(view)

    def _drain(self) -> None:
        """Wait for jobs of a round that was abandoned, and drop their results."""
        while any(w.running for w in self.workers):
            jobs = [Job("evaluate_global", 0, "", 0)] * (1 + max(i for w in self.workers for i, _ in w.running))
            self._collect(1.0, Window(jobs, 0), [0] * len(jobs))

    def close(self) -> None:
        """End the worker processes and remove the shared files."""
        (self.folder / "closing").touch()
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
        remove_shared_folder(self.folder)
