"""`fedskew serve`: the server of a run between sites."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.deploy.agreed import FILE, read_agreed
from fedskew.deploy.certs import Certificates
from fedskew.deploy.deployment import Deployment
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.membership import Membership
from fedskew.deploy.messages import OWN_DATA, Request
from fedskew.deploy.roster import Channel, Roster
from fedskew.deploy.status import STATUS, SiteStatus, Status, iso_time
from fedskew.experiment.assemble import assemble
from fedskew.experiment.base_run import BaseRun
from fedskew.experiment.config import Experiment
from fedskew.experiment.live import write_failure, write_split
from fedskew.experiment.run_directory import read_settings, versions
from fedskew.experiment.run_writer import RunWriter
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.federation.wire import digest
from fedskew.federation.world import World

START_SECONDS = 120.0  # time Flower has to start
DONE_SECONDS = 10.0  # time to wait for the sites at the end of a run
MIN_COUNT = 5  # privacy.min_count between real sites, unless it is given
SPOOL = "spool"  # folder of replies that wait for their turn


def check_served(experiment: Experiment, hosting: Hosting) -> None:
    """Raise UsageError if an experiment needs what only a simulation has."""
    if experiment.method.pooled:
        raise UsageError(
            f"method {experiment.method_name} trains on all data in one place, but sites keep their data: "
            "use `fedskew run`."
        )
    if experiment.evaluation.metric:
        raise UsageError("evaluation.metric is for simulated runs; between sites predictions are only counted.")
    if experiment.stop.patience:
        raise UsageError("stop is for simulated runs: between sites a round's figures arrive one round later.")
    if hosting.profile and experiment.data != OWN_DATA:
        raise UsageError("--profile is for sites with their own data (--data sites): how others are split is known.")


class Served(BaseRun):
    """A run between sites. Iterate over it for its records, as over `Run`.

    A round in which no site sends finite values raises `Diverged`. The run can be resumed: sites may do so on
    purpose.

    Args:
        experiment: the settings of the run.
        hosting: address, keys and timeouts of the server.
        out: the run's directory.
        say: prints a line for the operator.
        resume: continue the run in `out`.
        channel: starts the Flower process with a config and a log file; tests replace it.
    """

    simulated = trusting = False

    def __init__(
        self,
        experiment: Experiment,
        hosting: Hosting,
        out: Path,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        channel: Callable[[Header, Path], Channel] = lambda config, log: FlowerProcess(
            "link", config, log, log.parent / SPOOL
        ),
    ) -> None:
        check_served(experiment, hosting)
        if experiment.privacy.min_count is None:
            least = read_settings(out).privacy.min_count if resume else MIN_COUNT
            experiment = replace(experiment, privacy=replace(experiment.privacy, min_count=least))
        self.hosting, self.say = hosting, say
        own_data = experiment.data == OWN_DATA
        self.assembled = None if own_data else assemble(experiment, data_dir=hosting.data_dir)
        config = hosting.config()
        super().__init__(experiment, RunWriter(out, every=1), resume=resume)
        keys = sorted(config["sites"])  # names of the sites whose keys the server has
        self.agreed, notes = read_agreed(out, keys, hosting.server_data, resume=resume)
        self.notes += notes
        shutil.rmtree(out / SPOOL, ignore_errors=True)
        self.channel = channel(config, out / "flower.log")
        self.port, self.certificates, self.roster = self._open()
        self.membership = Membership(
            experiment=experiment,
            hosting=hosting,
            assembled=self.assembled,
            keys=keys,
            agreed=self.agreed,
            roster=self.roster,
            say=say,
        )
        self.roster.on_change = self.write_status

    @property
    def path(self) -> Path:
        """The run's directory."""
        assert self.directory is not None
        return self.directory.path

    def _open(self) -> tuple[int, Certificates, Roster]:
        """Wait until the Flower process is ready; returns the port it listens on, certificates and the roster."""
        frame = self.channel.receive(START_SECONDS)
        if frame is None or frame[0]["event"] != "ready":
            self.close()
            why = frame[0].get("text", "") if frame is not None else f"see {self.path / 'flower.log'}"
            raise UsageError(f"the Flower process did not start: {why}.")
        certificates = Certificates(frame[0].get("certificates", {}))
        roster = Roster(self.channel, self.agreed.sites, frame[0]["nodes"], self.say, keyless=self.hosting.insecure)
        return int(frame[0]["port"]), certificates, roster

    @property
    def expected(self) -> int:
        """How many sites should join; 0 if that is not known."""
        return self.membership.expected

    def __iter__(self) -> Iterator[Record]:
        self.check_new()
        try:
            if self.result is None:
                self.deployment = self.gather()
                self.write_status()
                for record in self._carry_out(self.deployment, self.lineup, self._cohort):
                    self.write_status()
                    yield record
                self._say_done()
        except Exception as error:
            write_failure(self.path, error)
            raise
        finally:
            self.write_status(over=True)
            self.close()

    def gather(self) -> Deployment:
        """Wait for the sites to join, agree with them on the task, and return the federation."""
        if not self.expected:
            raise UsageError("give the number of sites with --sites, as in --sites 3.")
        membership = self.membership
        greeted = self.roster.gather(self._request("hello"), self.hosting.patience, self.expected)
        answers = membership.agree(greeted)
        write_atomically(self.path / FILE, msgspec.json.encode(self.agreed))
        if self.hosting.profile:
            self.say(membership.describe_profile())
        self.lineup = membership.lineup()
        assert self.directory is not None
        self.directory.describe(membership.card(self.lineup))
        self._write_split()
        if len(answers) < self.lineup.quorum:
            raise QuorumLost(f"{membership.joined(answers)}, {self.lineup.quorum} are needed")
        return self._make_deployment()

    def _request(self, kind: Literal["hello", "work", "done"], world: World | None = None) -> Request:
        """A request without the fields of a round; with `world`, it contains what sites need to work."""
        request = Request(
            kind,
            self.agreed.run,
            str(self.experiment.data),
            profile=self.hosting.profile and kind == "hello",
            settings=json.loads(json.dumps(self.experiment.as_dict())),
            versions=versions(),
        )
        if world is None:
            return request
        return msgspec.structs.replace(
            request, sites=len(self.agreed.sites), task=self.agreed.task, initial=digest(world.initial)
        )

    def _make_deployment(self) -> Deployment:
        """The federation in the state in which the records so far left it."""
        lineup = self.lineup
        deployment = Deployment(
            world=lineup.world,
            roster=self.roster,
            request=self._request("work", lineup.world),
            timeout=self.hosting.timeout,
            norm_bound=self.hosting.norm_bound,
            samples=self._samples,
            evaluated=lineup.evaluated,
            newcomers=frozenset(lineup.newcomers),
        )
        for record in self.records:
            deployment.commit(record.round, record.trained)
            deployment.pending = record.round if record.metrics is not None else -1
        return deployment

    def _samples(self, client: int) -> int | None:
        """The training samples of a client. If its site has told new label counts, viewers get them."""
        before = dict(self.agreed.counts)
        samples = self.membership.samples(client)
        if self.agreed.counts != before:
            self._write_split()
        return samples

    def _write_split(self) -> None:
        """Write who has which classes for `fedskew watch`, if that is known."""
        if (known := self.membership.class_counts()) is not None:
            write_split(self.path, *known)

    def _cohort(self, round: int) -> list[int]:
        if self.hosting.choose == "all":
            return self.lineup.cohort(round)
        online = [client for client in self.roster.present() if client in self.lineup.members]
        return draw_cohort(online, self.lineup.cohort_size, self.experiment.seed, round)

    def _keep(self, record: Record) -> None:
        super()._keep(record)
        assert self.directory is not None
        self.deployment.keep = self.directory.previous

    def _closing(self, server: Payload) -> dict[str, Any]:
        card = self.membership.card(self.lineup)
        return {"sites": self.agreed.sites, "labels": list(card.labels), "skew": self.membership.skew()}

    def _say_done(self) -> None:
        """Send the sites that are online the end of the run."""
        self.roster.hello = None
        requests = dict.fromkeys(self.roster.present(), self._request("done"))
        with self.roster.collect(requests, b"", DONE_SECONDS):
            pass

    def absent(self) -> list[str]:
        """The names of the sites that were asked to train, or should have joined, and never took part."""
        trained = {client for record in self.records for client in record.trained}
        asked = {client for record in self.records for client in record.cohort}
        names = self.agreed.sites
        return [name for c, name in enumerate(names) if c not in trained and (c in asked or self._never_came(name))]

    def _never_came(self, name: str) -> bool:
        return name not in self.roster.answers

    def write_status(self, over: bool = False) -> None:
        """Write status.json for `fedskew status`."""
        for warning in self.certificates.warnings():
            self.say(warning)
        online = set(self.roster.present())
        lost = self.records[-1].lost if self.records else {}
        status = Status(
            address=f"{self.hosting.host}:{self.port}",
            pid=0 if over else os.getpid(),
            run=self.agreed.run,
            round=self.records[-1].round + 1 if self.records else 0,
            rounds=self.rounds,
            sites=[
                SiteStatus(
                    name,
                    client in online and not over,
                    name in self.roster.answers,
                    lost.get(client, ""),
                    iso_time(self.roster.seen.get(self.roster.nodes.get(name, -1))),
                )
                for client, name in enumerate(self.agreed.sites)
            ],
            refusals=self.roster.refusals,
            certificates=self.certificates.until,
        )
        write_atomically(self.path / STATUS, msgspec.json.encode(status))

    def close(self) -> None:
        """End the connection to the sites, and unlock the run's directory."""
        self.channel.close()
        shutil.rmtree(self.path / SPOOL, ignore_errors=True)
        assert self.directory is not None
        self.directory.close()
