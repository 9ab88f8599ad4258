"""Simulated clients: in this process, in worker processes, or on Ray. Results are bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

from fedskew.core.tensors import Payload
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.evaluation.scores import BATCH, ClientScore, Score, Together, thirds
from fedskew.evaluation.summary import Summary
from fedskew.federation.protocol import Reply
from fedskew.federation.simulate.faults import Fault, colluding, fault_at
from fedskew.federation.simulate.jobs import DIED_TWICE, Job, Lost, Result, Trained, decode_state, perform
from fedskew.federation.simulate.processes import Workers
from fedskew.federation.simulate.ray import Actors
from fedskew.federation.simulate.worker import cores, keep_freed_memory
from fedskew.federation.store import Blob, Store
from fedskew.federation.world import CHUNK, World

Engine = Literal["processes", "ray"]
START_AFTER = 1.0  # seconds of client work in this process after which workers=None starts worker processes


class WorkerPool(Protocol):
    """Worker processes, or Ray actors, that perform jobs."""

    world: World
    workers: list[Any]  # empty before `start`

    def start(self) -> None:
        """Start the workers."""
        ...

    def map(self, jobs: Sequence[Job], broadcast: Payload, state: Callable[[int], Blob]) -> Iterator[Result]:
        """Perform the jobs; yields results in the order of the jobs. `state(client)` is a client's state, or b""."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Simulation:
    """A federation whose clients are simulated. Use it in a `with` statement, or `close` it.

    Args:
        world: the data, the method and its settings.
        workers: number of worker processes. 1 uses this process only; None uses all cores, but starts the
            processes only after one second of client work, and none where the device is not the CPU: processes
            would share it, so their number must be given. With the engine "ray", the number of actors, which
            are started at once; None uses all CPUs of the cluster.
        engine: "processes" or "ray".
        store: where the clients' states are kept; None keeps them in memory.
        faults: faults to simulate.
        newcomers: clients that never train. They are evaluated as a group of their own.
        evaluated: clients that are evaluated on their own test samples; None evaluates all.
        wait_for_workers: whether jobs wait until worker processes have started; False performs them in this process
            meanwhile, and so does workers=None.
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
        wait_for_workers: bool = True,
    ) -> None:
        self.world, self.store, self.faults = world, store or Store(), tuple(faults)
        self.population = world.population
        self.newcomers = frozenset(newcomers)
        self.evaluated = range(self.population) if evaluated is None else evaluated
        self.summary = Summary()  # of the last evaluation
        self.evaluated_round = -1  # the round it was made after; -1: none yet
        self.sizes = world.train.sizes()
        self.groups = thirds(world.y[world.train.values].bincount(minlength=world.classes).tolist())
        self.shared_model: dict[int, tuple[int | None, bool]] = {}  # client -> (version of its state, uses it)
        self.client_seconds = 0.0  # time that clients have trained so far
        self.pool = self._make_pool(workers, engine, wait_for_workers)
        if self.pool is not None:
            self.world = self.pool.world
            if workers is not None or engine == "ray":
                try:
                    self.pool.start()
                except BaseException:
                    self.pool.close()
                    raise

    def _make_pool(self, workers: int | None, engine: Engine, wait: bool) -> WorkerPool | None:
        if engine == "ray":
            return Actors(self.world, workers)
        if workers is None and self.world.device != "cpu":
            return None  # how many processes a GPU has memory for is the user's to say
        count = cores() if workers is None else workers
        if count == 1:
            keep_freed_memory()
            return None
        return Workers(self.world, count, wait_for_start=wait and workers is not None)

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        self.store.discard()  # states of a round that was abandoned
        fault = {client: fault_at(self.faults, self.world.seed, client, round) for client in cohort}
        if cohort and all(one is not None and one.kind == "drop" for one in fault.values()):
            fault[cohort[0]] = None  # at least one client always answers
        absent = {"drop": "dropped out", "straggle": "answered too late"}
        kinds = {c: one.kind if one is not None else "" for c, one in fault.items()}
        why = {c: "has no training data" if not self.sizes[c] else absent.get(kinds[c], "") for c in cohort}
        present = [c for c in cohort if not why[c]]
        colluders = [c for c in present if kinds[c] == "alie"]
        present = colluders + [c for c in present if c not in colluders]
        jobs = [Job("train", round, stage, c, self.sizes[c], fault=fault[c]) for c in present]
        results = self._map(jobs, broadcast)
        together = self._collude(dict(zip(colluders, results, strict=False)), fault)
        for client in cohort:
            if why[client]:
                yield Reply(client, None, why[client])
                continue
            result = together[client] if client in together else next(results)
            if isinstance(result, Trained):
                self.store.stage(client, round, result.state_blob())
                self.client_seconds += result.seconds
                yield Reply(client, result.update, seconds=result.seconds)
            else:
                assert isinstance(result, Lost)
                yield Reply(client, None, result.why)

    @staticmethod
    def _collude(results: Mapping[int, Result], faults: Mapping[int, Fault | None]) -> dict[int, Result]:
        """The results of clients that attack together, which know each other's updates before they send theirs."""
        trained = {client: result for client, result in results.items() if isinstance(result, Trained)}
        fault = next((faults[client] for client in trained), None)
        if fault is None:
            return dict(results)
        sent = colluding([result.update for result in trained.values()], fault)
        changed = {c: r._replace(update=update) for (c, r), update in zip(trained.items(), sent, strict=True)}
        return {**results, **changed}

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        self.store.commit(accepted)

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        chunks = self.world.chunks() if self.world.method.has_global else 0
        jobs = [Job("evaluate_global", round, "evaluate", chunk, 1) for chunk in range(chunks)]
        sizes = self.world.test.sizes()
        tested = [c for c in self.evaluated if sizes[c]]
        small = [c for c in tested if sizes[c] < BATCH] if self.world.can_share_batches else []
        together = [c for c in small if self._uses_shared_model(c)]
        jobs += self._jobs_of(together, sizes, round)
        tested = sorted(set(tested) - set(together))
        jobs += [Job("evaluate_client", round, "evaluate", c, sizes[c], trained=c in self.store) for c in tested]
        self.summary, self.evaluated_round = self._summary(jobs, broadcast), round
        return self.summary.metrics(len(self.evaluated) < self.population, self.groups)

    def validate(self, round: int, broadcast: Payload) -> Metrics:
        """Evaluate the model on the validation samples of the clients that train; the test samples are not touched."""
        sizes = self.world.validation.sizes()
        members = [c for c in self.evaluated if sizes[c] and c not in self.newcomers]
        jobs = [Job("validate_client", round, "evaluate", c, sizes[c], trained=c in self.store) for c in members]
        return self._summary(jobs, broadcast).metrics(len(self.evaluated) < self.population, {})

    def _summary(self, jobs: Sequence[Job], broadcast: Payload) -> Summary:
        summary = Summary(self.newcomers)
        for job, result in zip(jobs, self._map(jobs, broadcast), strict=True):
            if isinstance(result, Score):
                summary.add_test(result)
            elif isinstance(result, ClientScore):
                summary.add(result)
            elif isinstance(result, Together):
                summary.add_together(job.clients, result, [c for c in job.clients if c not in self.store])
            else:
                raise RuntimeError(f"client {job.item} could not be evaluated: {result}")
        return summary

    def _uses_shared_model(self, client: int) -> bool:
        """Whether a client uses the server's model as it is; found out once for each version of its state."""
        version = self.store.version(client)
        if self.shared_model.get(client, (None, False))[0] != version or version is None:
            blob = self.store.get(client)
            self.shared_model[client] = (version, self.world.uses_shared_model(decode_state(blob)))
        return self.shared_model[client][1]

    def _jobs_of(self, clients: Sequence[int], sizes: Sequence[int], round: int) -> list[Job]:
        """Jobs that evaluate these clients together, about CHUNK samples each."""
        jobs: list[Job] = []
        start = count = 0
        for end, client in enumerate(clients, 1):
            count += sizes[client]
            if count >= CHUNK or end == len(clients):
                group = tuple(clients[start:end])
                jobs.append(Job("evaluate_together", round, "evaluate", group[0], count, clients=group))
                start, count = end, 0
        return jobs

    def late_metrics(self) -> Metrics | None:
        return None  # a simulated client is evaluated in the same round

    def own_figures(self) -> list[tuple[int, dict[int, tuple[float, float]]]]:
        return [(self.evaluated_round, self.summary.own_figures())]

    def per_client(self) -> dict[str, ClientRow]:
        return self.summary.rows()

    def confusion(self) -> dict[str, list[list[int]]]:
        return self.summary.confusion()

    def _map(self, jobs: Sequence[Job], broadcast: Payload) -> Iterator[Result]:
        if self.pool is not None:
            if not self.pool.workers and self.client_seconds > START_AFTER:
                self.pool.start()
            return self.pool.map(jobs, broadcast, self.store.get)
        return self._map_here(jobs, broadcast)

    def _map_here(self, jobs: Sequence[Job], broadcast: Payload) -> Iterator[Result]:
        for job in jobs:
            if job.dies:
                yield Lost(DIED_TWICE)
            else:
                yield perform(self.world, job, broadcast, self.store.get(job.item) if job.needs_state else b"")

    def close(self) -> None:
        """End the workers, if there are any."""
        if self.pool is not None:
            self.pool.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
