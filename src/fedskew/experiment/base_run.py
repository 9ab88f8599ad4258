"""What every run does: rounds, checkpoints, resuming, divergence, the result. See run.py and deploy/server.py."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from fedskew.core.fast.bf16 import bf16_warning
from fedskew.core.method import MODEL
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.experiment.assemble import Lineup
from fedskew.experiment.config import Experiment
from fedskew.experiment.given import method_text
from fedskew.experiment.live import append_clients, clear_failure, write_failure
from fedskew.experiment.result import Result, result_of
from fedskew.experiment.run_writer import RunWriter
from fedskew.experiment.stopping import why_stop
from fedskew.federation.cohort import is_evaluated
from fedskew.federation.divergence import DivergenceCheck
from fedskew.federation.ledger import FILE, Ledger
from fedskew.federation.loop import run as run_loop
from fedskew.federation.private import Plan
from fedskew.federation.protocol import Diverged, Federation, Record, merge_late
from fedskew.federation.wire import digest

log = logging.getLogger("fedskew")


class BaseRun(ABC):
    """What simulations and deployments have in common. Iterate over a run for its records; then `result` is set.

    `directory` is the run's directory (None: nothing is written); with `resume` the run in it is continued. `notes`
    are messages for the user, such as damaged checkpoints and versions of packages that changed.

    A run that diverges ends early, unless `experiment.on_divergence` is "warn". `diverged` says why.
    """

    simulated = True  # whether noise for privacy may follow from the seed
    trusting = True  # whether a round without one finite update ends the run: not if clients may send them on purpose

    def __init__(self, experiment: Experiment, directory: RunWriter | None, *, resume: bool) -> None:
        self.experiment, self.directory = experiment, directory
        self.rounds = len(experiment.method.stages(experiment.rounds))
        self.start: tuple[int, Payload] | None = None  # (next round, server state); None: from the beginning
        self.notes: list[str] = []
        self.records: list[Record] = []
        self.result: Result | None = None  # None: not finished yet
        self.check = DivergenceCheck()
        self.diverged = ""  # why the run counts as diverged; "": it does not
        self.begun = False  # whether its rounds were begun by iterating over it
        if directory is None:
            return
        if not resume:
            directory.begin(experiment)
            clear_failure(directory.path)
            return
        self.start, self.notes = directory.restore(experiment)
        clear_failure(directory.path)
        self.records = directory.read_records()
        self.diverged = next((r.diverged for r in self.records if r.diverged), "")
        result = directory.result()
        if self.start and (
            self.start[0] >= self.rounds
            or self.stopped
            or (result is not None and result.diverged and result.rounds == self.start[0])
        ):
            self.result = result

    def __repr__(self) -> str:
        name = self.experiment.data if isinstance(self.experiment.data, str) else self.experiment.data.name
        done = "finished" if self.result is not None else f"{len(self.records)} of {self.rounds} rounds done"
        place = f", in {self.directory.path}" if self.directory is not None else ""
        what = f"{method_text(self.experiment.method)} on {name}, {self.rounds} rounds, seed {self.experiment.seed}"
        return f"<{type(self).__name__} of {what}: {done}{place}>"

    @property
    def done(self) -> int:
        """The number of rounds that were finished when the run was started or resumed."""
        return 0 if self.start is None else self.start[0]

    @property
    def stopped(self) -> str:
        """Why the run leaves out the remaining training rounds, see `Stop`; "" if it does not."""
        return why_stop(self.records, self.experiment.stop)

    def check_new(self) -> None:
        """Raise UsageError if the rounds were begun before and not finished: they would be carried out twice."""
        if self.begun and self.result is None:
            raise UsageError(
                f"this run was left after {len(self.records)} of {self.rounds} rounds: "
                "go on with fedskew.run(experiment, out=..., resume=True) if it has a directory, or make a new run."
            )
        self.begun = True

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """Carry out the remaining rounds; yields a record of each."""

    def _carry_out(
        self,
        federation: Federation,
        lineup: Lineup,
        cohort: Callable[[int], list[int]] | None = None,
        validate: Callable[[int, Payload], float | None] | None = None,
        own: Callable[[int, Payload], float | None] | None = None,
    ) -> Iterator[Record]:
        """Carry out the remaining rounds and set the result. Finished rounds are saved, also after an exception.

        `cohort(round)` are the clients asked to train; None uses `lineup.cohort`. `validate` and `own` are as in the
        round loop.
        """
        last = None if self.start is None else (self.start[0] - 1, self.start[1])
        share = lineup.cohort_size / len(lineup.members)
        if warning := self.experiment.method.warning(self.experiment.training, share):
            log.warning(warning)
        if warning := bf16_warning(self.experiment.training.precision, lineup.world.device):
            log.warning(warning)
        private = self.private_plan(lineup)
        if private is not None and (warning := private.warning(private.to_come(self.rounds, self.done))):
            log.warning(warning)
        if private is not None and private.seed is None and (again := len(private.ledger.releases) - self.done) > 0:
            log.warning(f"{again} noisy sums were released of rounds that are repeated: each counts in epsilon.")
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
                robust=self.experiment.robust,
                private=private,
                validate=validate,
                own=own,
                stop=lambda: bool(self.stopped),
            ):
                record = self._judged(record)
                self._keep(record)
                self._keep_clients(record, federation)
                last = (record.round, record.server)
                if self.directory is not None and self.directory.due(record.round):
                    self.directory.save(*last)
                yield record
                if record.diverged and self.experiment.on_divergence == "stop":
                    break
        except BaseException as error:
            if self.directory is not None and last is not None:
                self.directory.save(*last)
            if self.directory is not None:
                write_failure(self.directory.path, error)
            if not isinstance(error, Diverged):
                raise
            why = f"the run diverged in round {1 if last is None else last[0] + 2}: {error}"
            if last is None or not self.trusting:
                raise Diverged(why) from None
            self.diverged = self.diverged or why
        if last is not None:
            self._finish(last[1], federation, lineup.world.initial)

    def private_plan(self, lineup: Lineup) -> Plan | None:
        """Differential privacy of this run; None: there is none."""
        seed = self.experiment.seed if self.simulated else None
        ledger = Ledger(None if self.directory is None else self.directory.path / FILE)
        clients = lineup.cohort_size, len(lineup.members)
        return self.experiment.privacy.plan(self.rounds, *clients, seed, ledger, self.done)

    def _judged(self, record: Record) -> Record:
        """The record, marked if it is the first that shows that the run diverged."""
        if not self.diverged:
            self.diverged = self.check.reason(self.records, record)
            return msgspec.structs.replace(record, diverged=self.diverged)
        return record

    def _keep(self, record: Record) -> None:
        """Add a record to the run's directory and to `records`."""
        without_server = msgspec.structs.replace(record, server=None)
        if self.directory is not None:
            self.directory.append(without_server)
        self.records[-1:] = merge_late([*self.records[-1:], without_server])

    def _keep_clients(self, record: Record, federation: Federation) -> None:
        """Add the figures of clients' own models to the run's directory, if they became known in this round."""
        if self.directory is not None and (record.metrics is not None or record.before is not None):
            for round, figures in federation.own_figures():
                append_clients(self.directory.path, round, figures, federation.population)

    def _finish(self, server: Payload, federation: Federation, initial: Payload) -> None:
        """Set the result; write it, the global model and the server's state."""
        model = {group: initial[group] | server.get(group, Tensors()) for group in MODEL}
        self.result = result_of(
            self.experiment,
            self.records,
            digest=digest(server),
            model_digest=digest(model),
            clients=federation.per_client(),
            diverged=self.diverged,
            confusion=federation.confusion(),
            stopped=self.stopped,
            **self._closing(server),
        )
        if self.directory is not None:
            self.directory.save(self.records[-1].round, server)
            self.directory.finish(server, model, self.result)

    def _closing(self, server: Payload) -> dict[str, Any]:
        """Further fields of the result; subclasses override it."""
        return {}
