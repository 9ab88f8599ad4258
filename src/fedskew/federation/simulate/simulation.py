"""Clients simulated: in this process, in worker processes, or on Ray, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

from fedskew.core.tensors import Payload
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.evaluation.scores import ClientScore, Score, per_client, summarise, thirds
from fedskew.federation.protocol import Reply
from fedskew.federation.simulate.faults import Fault, struck
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, perform
from fedskew.federation.simulate.processes import Workers
from fedskew.federation.simulate.ray import Actors
from fedskew.federation.simulate.worker import cores
from fedskew.federation.store import Blob, Store
from fedskew.federation.world import World

Engine = Literal["processes", "ray"]
PATIENCE = 1.0  # seconds of client work in this process before worker processes are worth their start


class WorkerPool(Protocol):
    """Worker processes, or Ray actors, that do jobs."""

    world: World
    workers: list[Any]  # those that were started

    def start(self) -> None: ...

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]: ...

    def close(self) -> None: ...


class Simulation:
    """A federation whose clients are simulated. Use it in a `with` statement, or `close` it.

    `workers` are processes: 1 works in this one, None takes all cores but starts them only once the run has lasted
    a second. With the engine `ray` they are actors, started at once. `store` holds the clients' states (None: in
    memory), `faults` are simulated, `newcomers` are clients that never train, and `evaluated` are the clients whose
    own test part is evaluated (None: all).
    """

    def __init__(
        self,
        world: World,
        *,
        workers: int | None = 1,
        engine: Engine = "processes",
        store: Store | None = None,
        faults: Sequence[Fault] = (),
        newcomers: Sequence[int] = (),
        evaluated: Sequence[int] | None = None,
    ) -> None:
        self.world, self.store, self.faults = world, store or Store(), tuple(faults)
        self.population = world.population
        self.newcomers = frozenset(newcomers)
        self.evaluated = range(self.population) if evaluated is None else evaluated
        self.scores: list[ClientScore] = []  # of the last evaluation, client by client
        self.sizes = world.train.sizes()
        self.groups = thirds(world.y[world.train.values].bincount(minlength=world.classes).tolist())
        self.spent = 0.0  # seconds of client work done in this process
        self.pool = self._pool(workers, engine)
        if self.pool is not None:
            self.world = self.pool.world
            if workers is not None or engine == "ray":
                try:
                    self.pool.start()
                except BaseException:
                    self.pool.close()
                    raise

    def _pool(self, workers: int | None, engine: Engine) -> WorkerPool | None:
        if engine == "ray":
            return Actors(self.world, workers)
        count = cores() if workers is None else workers
        if count == 1 or self.world.device != "cpu":
            return None
        return Workers(self.world, count, patient=workers is not None)

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        self.store.discard()  # what an abandoned round left
        fault = {client: struck(self.faults, self.world.seed, client, round) for client in cohort}
        if cohort and all(kind == "drop" for kind in fault.values()):
            fault[cohort[0]] = None  # at least one client always answers
        absent = {"drop": "dropped out", "straggle": "answered too late"}
        why = {c: "has no training data" if not self.sizes[c] else absent.get(fault[c] or "", "") for c in cohort}
        present = [c for c in cohort if not why[c]]
        jobs = [Job("train", round, stage, c, self.sizes[c], fault=fault[c]) for c in present]
        results = self._map(jobs, broadcast)
        for client in cohort:
            if why[client]:
                yield Reply(client, None, why[client])
                continue
            result = next(results)
            if isinstance(result, Trained):
                self.store.stage(client, round, result.state)
                self.spent += result.seconds
                yield Reply(client, result.update, seconds=result.seconds)
            else:
                assert isinstance(result, Lost)
                yield Reply(client, None, result.why)

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        self.store.commit(accepted)

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        pieces = self.world.chunks() if self.world.method.has_global else 0
        jobs = [Job("evaluate_global", round, "evaluate", piece, 1) for piece in range(pieces)]
        sizes = self.world.test.sizes()
        tested = [c for c in self.evaluated if sizes[c]]
        jobs += [Job("evaluate_client", round, "evaluate", c, sizes[c], trained=c in self.store) for c in tested]
        test: Score | None = None
        self.scores = []
        for job, result in zip(jobs, self._map(jobs, broadcast), strict=True):
            if isinstance(result, Score):
                test = result if test is None else test + result
            elif isinstance(result, ClientScore):
                self.scores.append(result)
            else:
                raise RuntimeError(f"client {job.item} could not be evaluated: {result}")
        sampled = len(self.evaluated) < self.population
        return summarise(test, self.scores, self.newcomers, sampled, self.groups)

    def late_metrics(self) -> Metrics | None:
        return None  # a simulated client is evaluated at once

    def per_client(self) -> dict[str, ClientRow]:
        """Each client's own figures in the last evaluation."""
        return per_client(self.scores)

    def _map(self, jobs: Sequence[Job], broadcast: Payload) -> Iterator[Result]:
        if self.pool is not None:
            if not self.pool.workers and self.spent > PATIENCE:
                self.pool.start()
            return self.pool.map(jobs, broadcast, self.store.get)
        return self._here(jobs, broadcast)

    def _here(self, jobs: Sequence[Job], broadcast: Payload) -> Iterator[Result]:
        for job in jobs:
            if job.fault == "die":
                yield Lost("its process died twice")
            else:
                yield perform(self.world, job, broadcast, self.store.get(job.item) if job.needs_state else b"")

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
