"""A run: an experiment carried out here, record by record, with a directory it can be taken up from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedskew.core.method import MODEL
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.evaluation.figures import headline
from fedskew.experiment.assemble import Assembled, assemble
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.diagnostics import diagnose
from fedskew.experiment.run_directory import RunDirectory
from fedskew.experiment.tracking import tracked, trackers
from fedskew.federation.loop import run as run_loop
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Engine, Simulation
from fedskew.federation.store import Store
from fedskew.federation.wire import digest

log = logging.getLogger("fedskew")


class Run:
    """Iterate over it for records; afterwards `result` holds the closing figures.

    `out` is the run's directory (None: nothing is written). `workers`: processes, None for all cores;
    with `engine="ray"` actors, None for all of the cluster's CPUs.
    `track`: names of trackers that are told every record too (see track.py).
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
        self.experiment = experiment
        self.setting: Assembled = assemble(experiment, data_dir=Path(data_dir) if data_dir else None, device=device)
        self.workers, self.engine = workers, engine
        self.sinks = trackers(track)
        self.directory = RunDirectory(Path(out), checkpoint_every) if out is not None else None
        self.start: tuple[int, Payload] | None = None
        self.troubles: list[str] = []  # what `resume` found damaged
        self.records: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        if self.directory is not None:
            if resume:
                self.start, self.troubles = self.directory.restore()
                self.records = list(self.directory.read_records())
                self.result = self.directory.result() if self.start and self.start[0] >= self.rounds else {}
            else:
                self.directory.begin(experiment.to_toml())

    @property
    def rounds(self) -> int:
        return self.setting.world.rounds

    def __iter__(self) -> Iterator[Record]:
        try:
            if not self.result:
                folder = self.directory.path if self.directory is not None else Path("runs")
                first = self.start[0] if self.start else 0
                with tracked(self.sinks, folder, self.experiment.as_dict(), first) as tell:
                    for record in self._rounds():
                        tell(self.records[-1])
                        yield record
        finally:
            if self.directory is not None:
                self.directory.close()

    def _rounds(self) -> Iterator[Record]:
        setting, directory = self.setting, self.directory
        last: tuple[int, Payload] | None = None if self.start is None else (self.start[0] - 1, self.start[1])
        simulation = Simulation(
            setting.world,
            workers=self.workers,
            engine=self.engine,
            store=directory.store if directory is not None else Store(),
            faults=self.experiment.trouble.faults(),
            newcomers=setting.newcomers,
            judged=setting.judged,
        )
        with simulation:
            try:
                for record in run_loop(
                    self.experiment.method,
                    simulation,
                    simulation.world.server_site,
                    self.experiment.rounds,
                    setting.cohort,
                    quorum=setting.quorum,
                    evaluate=self._evaluated,
                    start=self.start,
                ):
                    self.records.append(record.as_dict())
                    last = (record.round, record.server)
                    if directory is not None:
                        directory.append(self.records[-1])
                        if directory.due(record.round):
                            directory.save(*last)
                    yield record
            except BaseException:
                # stopped, or a quorum was lost: what was finished is kept
                if directory is not None and last is not None:
                    directory.save(*last)
                raise
            if last is not None:
                self._finish(last[1], simulation)

    def _evaluated(self, round: int) -> bool:
        return (round + 1) % self.experiment.evaluation.every == 0 or round == self.rounds - 1

    def _finish(self, server: Payload, simulation: Simulation) -> None:
        model, self.result = ended(self.experiment, self.records, server, simulation.world.initial)
        self.result["clients"] = simulation.per_client()
        if self.experiment.evaluation.diagnose:
            self.result["diagnostics"] = diagnose(simulation.world, server, simulation.store, self.setting.members)
        if self.directory is not None:
            self.directory.save(self.records[-1]["round"], server)
            self.directory.finish(server, model, self.result)


def ended(
    experiment: Experiment, records: list[dict[str, Any]], server: Payload, initial: Payload
) -> tuple[Payload, dict[str, Any]]:
    """The whole global model of a finished run, and its closing figures with both fingerprints."""
    model = {group: initial[group] | server.get(group, Tensors()) for group in MODEL}
    return model, closing(experiment, records) | {"digest": digest(server), "model_digest": digest(model)}


def closing(experiment: Experiment, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The closing figures of a run: the last round's metrics, and what it all cost."""
    last = records[-1]
    return {
        "method": experiment.method_name,
        "seed": experiment.seed,
        "rounds": last["round"] + 1,
        "accuracy": headline(last["metrics"] or {}),
        "metrics": last["metrics"],
        "bytes_up": sum(sum(r["bytes_up"].values()) for r in records),
        "bytes_down": sum(sum(r["bytes_down"].values()) for r in records),
        "client_seconds": sum(r["client_seconds"] for r in records),
        "server_seconds": sum(r["server_seconds"] for r in records),
        "seconds": sum(r["seconds"] for r in records),
        "lost": sum(len(r["lost"]) for r in records),
        "settings": experiment.as_dict(),
    }


def run(experiment: Experiment | None = None, **options: Any) -> Run:
    """Run an experiment: `for record in fedskew.run(Experiment(...)): ...`"""
    return Run(experiment or Experiment(), **options)


def resume(path: Path | str, **options: Any) -> Run:
    """Take up a run where its directory left it, to the same result as if it had never stopped."""
    path = Path(path)
    if not (path / "settings.toml").exists():
        raise UsageError(f"{path} holds no run: there is no settings.toml in it.")
    return Run(from_dict(read_toml(path / "settings.toml")), out=path, resume=True, **options)
