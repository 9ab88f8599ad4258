"""An experiment carried out: rounds, checkpoints, resuming, closing figures. For real sites see deploy/server.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.method import MODEL
from fedskew.core.tensors import Payload, Tensors
from fedskew.experiment.assemble import Lineup, assemble
from fedskew.experiment.config import Experiment
from fedskew.experiment.diagnostics import diagnose
from fedskew.experiment.result import Result, result_of
from fedskew.experiment.run_directory import RunDirectory, read_settings
from fedskew.experiment.tracking import tracked, trackers
from fedskew.federation.cohort import is_evaluated
from fedskew.federation.loop import run as run_loop
from fedskew.federation.protocol import Federation, Record, merge_late
from fedskew.federation.simulate.simulation import Engine, Simulation
from fedskew.federation.store import Store
from fedskew.federation.wire import digest


class BaseRun(ABC):
    """An experiment carried out somewhere: iterate over it for records; then `result` holds the closing figures.

    What simulation and deployment share: the round loop, the run's directory, resuming. `directory` None writes
    nothing. After resuming, `notes` says what was found damaged or different.
    """

    def __init__(self, experiment: Experiment, directory: RunDirectory | None, *, resume: bool) -> None:
        self.experiment, self.directory = experiment, directory
        self.rounds = len(experiment.method.stages(experiment.rounds))
        self.start: tuple[int, Payload] | None = None  # (next round, server state) of a run that is resumed
        self.notes: list[str] = []
        self.records: list[Record] = []
        self.result: Result | None = None  # None: not finished
        if directory is None:
            return
        if not resume:
            directory.begin(experiment)
            return
        self.start, self.notes = directory.restore()
        self.records = directory.read_records()
        if self.start and self.start[0] >= self.rounds:
            self.result = directory.result()

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """The records of the rounds that are still to do."""

    def _carry_out(
        self, federation: Federation, lineup: Lineup, cohort: Callable[[int], list[int]] | None = None
    ) -> Iterator[Record]:
        """Every round still to do, then the closing figures. What is done is saved, also when it is interrupted.

        `cohort(round)` are the clients to ask; None draws them as the experiment says.
        """
        last = None if self.start is None else (self.start[0] - 1, self.start[1])
        try:
            for record in run_loop(
                self.experiment.method,
                federation,
                lineup.world.server_site,
                self.experiment.rounds,
                cohort or lineup.cohort,
                quorum=lineup.quorum,
                evaluate=partial(is_evaluated, rounds=self.rounds, every=self.experiment.evaluation.every),
                start=self.start,
            ):
                last = (record.round, record.server)
                self._keep(record)
                yield record
        except BaseException:
            if self.directory is not None and last is not None:
                self.directory.save(*last)
            raise
        if last is not None:
            self._finish(last[1], federation, lineup.world.initial)

    def _keep(self, record: Record) -> None:
        """Remember a record; where there is a directory, write it, and a checkpoint if one is due."""
        light = msgspec.structs.replace(record, server=None)
        self.records[-1:] = merge_late([*self.records[-1:], light])
        if self.directory is not None:
            self.directory.append(light)
            if self.directory.due(record.round):
                self.directory.save(record.round, record.server)

    def _finish(self, server: Payload, federation: Federation, initial: Payload) -> None:
        """The last round is done: the closing figures, and the whole global model."""
        model = {group: initial[group] | server.get(group, Tensors()) for group in MODEL}
        self.result = result_of(
            self.experiment,
            self.records,
            digest=digest(server),
            model_digest=digest(model),
            clients=federation.per_client(),
            **self._closing(server),
        )
        if self.directory is not None:
            self.directory.save(self.records[-1].round, server)
            self.directory.finish(server, model, self.result)

    def _closing(self, server: Payload) -> dict[str, Any]:
        """Further fields of the result."""
        return {}


class Run(BaseRun):
    """A simulated run.

    `out` is the run's directory (None: nothing is written). `workers` are processes: 1 works in this one, None
    takes all cores; with `engine="ray"` they are actors, None for all CPUs of the cluster. `data_dir` is where
    named data sets lie, `checkpoint_every` the rounds between checkpoints (0: spaced so that they stay cheap),
    `resume` continues the run in `out`, and `track` names trackers that get every record too (see tracking.py).
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path | str | None = None,
        workers: int | None = 1,
        engine: Engine = "processes",
        data_dir: Path | str | None = None,
        device: str = "cpu",
        checkpoint_every: int = 0,
        resume: bool = False,
        track: Sequence[str] = (),
    ) -> None:
        self.assembled = assemble(experiment, data_dir=Path(data_dir) if data_dir else None, device=device)
        self.workers, self.engine = workers, engine
        self.trackers = trackers(track)
        directory = RunDirectory(Path(out), checkpoint_every) if out is not None else None
        super().__init__(experiment, directory, resume=resume)

    def __iter__(self) -> Iterator[Record]:
        try:
            if self.result is None:
                folder = self.directory.path if self.directory is not None else Path("runs")
                first = self.start[0] if self.start else 0
                with tracked(self.trackers, folder, self.experiment.as_dict(), first) as track:
                    for record in self._rounds():
                        track(record)
                        yield record
        finally:
            if self.directory is not None:
                self.directory.close()

    def _rounds(self) -> Iterator[Record]:
        self.simulation = Simulation(
            self.assembled.world,
            workers=self.workers,
            engine=self.engine,
            store=self.directory.store if self.directory is not None else Store(),
            faults=self.experiment.trouble.faults(),
            newcomers=self.assembled.newcomers,
            evaluated=self.assembled.evaluated,
        )
        with self.simulation:
            yield from self._carry_out(self.simulation, self.assembled)

    def _closing(self, server: Payload) -> dict[str, Any]:
        if not self.experiment.evaluation.diagnose:
            return {}
        simulation = self.simulation
        return {"diagnostics": diagnose(simulation.world, server, simulation.store, self.assembled.members)}


def run(experiment: Experiment | None = None, **options: Any) -> Run:
    """Run an experiment (None: the default one). Options are those of `Run`.

    >>> import fedskew
    >>> run = fedskew.run(fedskew.Experiment(rounds=2))
    >>> [record.round for record in run]
    [0, 1]
    >>> run.result.rounds
    2
    """
    return Run(experiment or Experiment(), **options)


def resume(path: Path | str, **options: Any) -> Run:
    """Continue the run in a directory, to the same result as if it had never stopped. Options are those of `Run`."""
    return Run(read_settings(Path(path)), out=path, resume=True, **options)
