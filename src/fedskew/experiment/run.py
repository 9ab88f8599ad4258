"""Runs an experiment: rounds, checkpoints, resuming, the result. Simulated here; deploy/ runs it between real sites."""

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
    """What simulations and deployments have in common. Iterate over a run for its records; then `result` is set.

    `directory` is the run's directory (None: nothing is written); with `resume` the run in it is continued. Then
    `notes` are messages for the user: damaged checkpoints, and versions of packages that changed.
    """

    def __init__(self, experiment: Experiment, directory: RunDirectory | None, *, resume: bool) -> None:
        self.experiment, self.directory = experiment, directory
        self.rounds = len(experiment.method.stages(experiment.rounds))
        self.start: tuple[int, Payload] | None = None  # (next round, server state); None: from the beginning
        self.notes: list[str] = []
        self.records: list[Record] = []
        self.result: Result | None = None  # None: not finished yet
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
        """Carry out the remaining rounds; yields a record of each."""

    def _carry_out(
        self, federation: Federation, lineup: Lineup, cohort: Callable[[int], list[int]] | None = None
    ) -> Iterator[Record]:
        """Carry out the remaining rounds and set the result. Finished rounds are saved, also after an exception.

        `cohort(round)` are the clients asked to train; None uses `lineup.cohort`.
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
                evaluate=partial(is_evaluated, rounds=self.rounds, every=lineup.evaluate_every),
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
        """Add a record to `records` and to the run's directory; writes a checkpoint if one is due."""
        without_server = msgspec.structs.replace(record, server=None)
        self.records[-1:] = merge_late([*self.records[-1:], without_server])
        if self.directory is not None:
            self.directory.append(without_server)
            if self.directory.due(record.round):
                self.directory.save(record.round, record.server)

    def _finish(self, server: Payload, federation: Federation, initial: Payload) -> None:
        """Set the result; write it, the global model and the server's state."""
        model = {group: initial[group] | server.get(group, Tensors()) for group in MODEL}
        self.result = result_of(
            self.experiment,
            self.records,
            digest=digest(server),
            model_digest=digest(model),
            clients=federation.per_client(),
            confusion=federation.confusion(),
            **self._closing(server),
        )
        if self.directory is not None:
            self.directory.save(self.records[-1].round, server)
            self.directory.finish(server, model, self.result)

    def _closing(self, server: Payload) -> dict[str, Any]:
        """Further fields of the result; subclasses override it."""
        return {}


class Run(BaseRun):
    """A simulated run.

    Args:
        experiment: the settings.
        out: the run's directory; None writes nothing.
        workers: number of worker processes. 1 uses this process only, None uses all cores. With the engine "ray",
            the number of actors; None uses all CPUs of the cluster.
        engine: "processes" or "ray".
        data_dir: where named data sets are; None is the default folder.
        device: "cpu", "cuda" or "mps".
        checkpoint_every: rounds between checkpoints; 0 spaces them so that they take at most a twentieth of the time.
        resume: continue the run in `out`.
        track: names of trackers that get every record too (see tracking.py).
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
            wait_for_workers=False,
        )
        self.assembled = self.assembled.with_world(self.simulation.world)
        with self.simulation:
            yield from self._carry_out(self.simulation, self.assembled)

    def _closing(self, server: Payload) -> dict[str, Any]:
        if not self.experiment.evaluation.diagnose:
            return {}
        simulation = self.simulation
        return {"diagnostics": diagnose(simulation.world, server, simulation.store, self.assembled.members)}


def run(experiment: Experiment | None = None, **options: Any) -> Run:
    """Prepare a run of an experiment (None: the default one); iterate over it to train. Options are those of `Run`.

    >>> import fedskew
    >>> run = fedskew.run(fedskew.Experiment(rounds=2))
    >>> [record.round for record in run]
    [0, 1]
    >>> run.result.rounds
    2
    """
    return Run(experiment or Experiment(), **options)


def resume(path: Path | str, **options: Any) -> Run:
    """Continue the run in a directory; its result is as if it had never stopped. Options are those of `Run`."""
    return Run(read_settings(Path(path)), out=path, resume=True, **options)
