"""Runs an experiment in a simulation; deploy/server.py runs it between real sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError, path_of
from fedskew.core.tensors import Payload
from fedskew.data.dataset import DataSet
from fedskew.data.split.skew import class_table
from fedskew.evaluation.figures import headline
from fedskew.experiment.assemble import assemble
from fedskew.experiment.base_run import BaseRun
from fedskew.experiment.card import card_of_assembled
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.diagnostics import diagnose
from fedskew.experiment.extension import data_mark
from fedskew.experiment.live import write_split
from fedskew.experiment.machine import pick_device, worker_count
from fedskew.experiment.own_metric import load_metric
from fedskew.experiment.run_directory import read_settings
from fedskew.experiment.run_writer import RunWriter
from fedskew.experiment.skewness import skew_figures
from fedskew.experiment.tracking import tracked, trackers
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Engine, Simulation
from fedskew.federation.store import Store


class Run(BaseRun):
    """A simulated run.

    Args:
        experiment: the settings.
        out: the run's directory; None writes nothing.
        workers: number of worker processes. 1 uses this process only, None uses all cores; more than there are cores
            become as many as there are cores. With the engine "ray", the number of actors; None uses all CPUs of
            the cluster.
        engine: "processes" or "ray".
        data_dir: where named data sets are; None is the default folder.
        device: "cpu", "cuda", "mps", or "auto" for the first of cuda, mps and cpu that is available.
        checkpoint_every: rounds between checkpoints; 0 spaces them so that they take at most a twentieth of the time.
        resume: continue the run in `out`.
        track: names of trackers that get every record too (see tracking.py).
        loaded: the data set that the experiment names, if it was loaded before; None loads it.
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
        loaded: DataSet | None = None,
    ) -> None:
        if not isinstance(experiment, Experiment):
            raise UsageError(f"{experiment!r} is not an experiment: expected fedskew.Experiment(...).")
        if not isinstance(checkpoint_every, int) or checkpoint_every < 0:
            raise UsageError(f"checkpoint_every={checkpoint_every!r} is invalid: expected a number of at least 0.")
        (self.workers, notes), self.engine = worker_count(workers, engine), engine
        self.trackers = trackers(track)
        folder = path_of(data_dir, "data_dir") if data_dir else None
        self.assembled = assemble(experiment, data_dir=folder, device=pick_device(device), loaded=loaded)
        metric = experiment.evaluation.metric
        self.own = load_metric(metric, self.assembled.world) if metric else None
        directory = None
        if out is not None:
            directory = RunWriter(path_of(out, "out"), checkpoint_every, data_mark(self.assembled.world))
        super().__init__(experiment, directory, resume=resume)
        self.notes = notes + self.notes

    def __iter__(self) -> Iterator[Record]:
        self.check_new()
        try:
            if self.result is None:
                if self.directory is not None:
                    self.directory.describe(card_of_assembled(self.experiment, self.assembled))
                    data = self.assembled.data
                    write_split(self.directory.path, class_table(self.assembled.partition, data.y_train, data.classes))
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
            validate = self._validate if self.experiment.stop.patience else None
            yield from self._carry_out(self.simulation, self.assembled, validate=validate, own=self.own)

    def _validate(self, round: int, broadcast: Payload) -> float | None:
        return headline(self.simulation.validate(round, broadcast), self.experiment.stop.figure or None)

    def _closing(self, server: Payload) -> dict[str, Any]:
        found: dict[str, Any] = {"sites": list(self.assembled.owners), "labels": list(self.assembled.labels)}
        found["skew"] = skew_figures(self.assembled)
        if self.experiment.evaluation.diagnose:
            simulation = self.simulation
            found["diagnostics"] = diagnose(simulation.world, server, simulation.store, self.assembled.members)
        return found


def run(experiment: Experiment | None = None, **options: Any) -> Run:
    """Prepare a run of an experiment (None: the default one); iterate over it to train. Options are those of `Run`.

    >>> import fedskew
    >>> run = fedskew.run(fedskew.Experiment(rounds=2))
    >>> [record.number for record in run]
    [1, 2]
    >>> run.result.rounds
    2
    """
    return Run(Experiment() if experiment is None else experiment, **options)


def resume(path: Path | str, *, rounds: int | str | None = None, **options: Any) -> Run:
    """Continue the run in a directory; its result is as if it had never stopped. Options are those of `Run`.

    rounds: give the run, which may be finished, so many rounds in all; None keeps its own. Refused where the result
    would not be that of a run with these rounds from the start, as with a learning rate that falls over the run.
    """
    experiment = read_settings(path_of(path, "path"))
    if rounds is not None:
        experiment = from_dict(experiment.as_dict() | {"rounds": rounds})
    return Run(experiment, out=path, resume=True, **options)
