"""`fedskew serve`: the server of a run between sites."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.sources.loading import load
from fedskew.data.split.skew import class_table
from fedskew.deploy import handshake, profile
from fedskew.deploy.agreed import FILE, read_agreed
from fedskew.deploy.certs import expiry_warning
from fedskew.deploy.deployment import Deployment
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import OWN_DATA, Request, SiteFacts
from fedskew.deploy.roster import Channel, Roster
from fedskew.deploy.status import STATUS, SiteStatus, Status, iso_time
from fedskew.experiment.assemble import Lineup, assemble, cohort_size_and_quorum
from fedskew.experiment.base_run import BaseRun
from fedskew.experiment.card import ModelCard, card_of
from fedskew.experiment.config import Experiment
from fedskew.experiment.live import write_failure, write_split
from fedskew.experiment.run_directory import read_settings, versions
from fedskew.experiment.run_writer import RunWriter
from fedskew.experiment.skewness import skew_figures
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.federation.wire import digest
from fedskew.federation.world import World

START_SECONDS = 120.0  # time Flower has to start
DONE_SECONDS = 10.0  # time to wait for the sites at the end of a run
MIN_COUNT = 5  # privacy.min_count between real sites, unless it is given
SPOOL = "spool"  # folder of replies that wait for their turn


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
            raise UsageError(
                "--profile is for sites with their own data (--data sites): how others are split is known."
            )
        if experiment.privacy.min_count is None:
            least = read_settings(out).privacy.min_count if resume else MIN_COUNT
            experiment = replace(experiment, privacy=replace(experiment.privacy, min_count=least))
        self.hosting, self.say = hosting, say
        self.own_data = experiment.data == OWN_DATA
        self.assembled = None if self.own_data else assemble(experiment, data_dir=hosting.data_dir)
        config = hosting.config()
        super().__init__(experiment, RunWriter(out, every=1), resume=resume)
        self.keys = sorted(config["sites"])  # names of the sites whose keys the server has
        self.agreed, notes = read_agreed(out, self.keys, hosting.server_data, resume=resume)
        self.notes += notes
        shutil.rmtree(out / SPOOL, ignore_errors=True)
        self.channel = channel(config, out / "flower.log")
        self.certificates: dict[str, str] = {}  # name -> until when it is valid
        self.warned = ""  # day of the last warning about them
        self.port, self.roster = self._open()
        self.roster.on_change = self.write_status

    @property
    def path(self) -> Path:
        """The run's directory."""
        assert self.directory is not None
        return self.directory.path

    def _open(self) -> tuple[int, Roster]:
        """Wait until the Flower process is ready; returns the port it listens on and the roster."""
        frame = self.channel.receive(START_SECONDS)
        if frame is None or frame[0]["event"] != "ready":
            self.close()
            why = frame[0].get("text", "") if frame is not None else f"see {self.path / 'flower.log'}"
            raise UsageError(f"the Flower process did not start: {why}.")
        self.certificates = frame[0].get("certificates", {})
        roster = Roster(self.channel, self.agreed.sites, frame[0]["nodes"], self.say, keyless=self.hosting.insecure)
        return int(frame[0]["port"]), roster

    @property
    def expected(self) -> int:
        """How many sites should join; 0 if that is not known."""
        split = self.assembled.world.population if self.assembled else 0
        return len(self.keys) or len(self.agreed.sites) or self.hosting.sites or split

    def __iter__(self) -> Iterator[Record]:
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
        patience = self.hosting.patience
        answers = self.roster.gather(self._request("hello"), patience, self.expected)
        facts = {name: answer.facts for name, answer in answers.items() if answer.facts is not None}
        if self.own_data and self.agreed.task is None:
            self.agreed.task = handshake.agree_without_misfits(facts, self.roster.refuse)
            answers = {name: answer for name, answer in answers.items() if name in facts}
        if self.agreed.task is not None and (filled := handshake.describe_filling(self.agreed.task, facts)):
            self.say(f"note: {filled}")
        for name, fact in facts.items():
            self._note_facts(name, fact)
        joined = f"{len(answers)} of {self.expected} sites joined within {patience:g} s"
        for name, answer in sorted(answers.items()):
            if other := [f"{k} {v}" for k, v in answer.versions.items() if versions().get(k) not in (v, None)]:
                self.say(f"site {name} has {', '.join(other)}: results may not be bit-identical")
        if not self.agreed.sites:
            if len(answers) < self.expected:
                raise UsageError(f"{joined}; give more time with --patience.")
            self.agreed.sites = sorted(answers)
        self.roster.names = self.agreed.sites
        if self.own_data and self.agreed.task is None:
            raise UsageError(f"no site joined within {patience:g} s; give more time with --patience.")
        write_atomically(self.path / FILE, msgspec.json.encode(self.agreed))
        if self.hosting.profile:
            silent = [name for name in self.agreed.sites if name not in self.agreed.counts]
            self.say(profile.describe(self._skew(), silent))
        self.lineup = self._make_lineup()
        assert self.directory is not None
        self.directory.describe(self._card())
        self._write_split()
        if len(answers) < self.lineup.quorum:
            raise QuorumLost(f"{joined}, {self.lineup.quorum} are needed")
        return self._make_deployment()

    def _make_lineup(self) -> Lineup:
        count = len(self.agreed.sites)
        if self.assembled is not None:
            if self.assembled.world.population != count:
                raise UsageError(
                    f"the split has {self.assembled.world.population} clients, but there are {count} sites; "
                    f"give a split with clients={count}."
                )
            return self.assembled
        assert self.agreed.task is not None
        data = load(self.agreed.server_data, self.hosting.data_dir) if self.agreed.server_data else None
        clients = tuple(range(count))
        size, quorum = cohort_size_and_quorum(self.experiment, len(clients))
        return Lineup(
            world=handshake.server_world(self.experiment, self.agreed.task, data, count, "cpu"),
            members=clients,
            newcomers=(),
            evaluated=clients,
            cohort_size=size,
            quorum=quorum,
        )

    def _card(self) -> ModelCard:
        if self.assembled is not None:
            labels, table = self.assembled.labels, self.assembled.table
        else:
            assert self.agreed.task is not None
            labels, table = self.agreed.task.labels, self.agreed.task.table
        return card_of(self.experiment, self.lineup.world, labels, table, tuple(self.agreed.sites))

    def _request(self, kind: Literal["hello", "work", "done"], world: World | None = None) -> Request:
        """A request without the fields of a round; with `world`, it contains what sites need to work."""
        request = Request(
            kind,
            self.agreed.run,
            OWN_DATA if self.own_data else str(self.experiment.data),
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
        """The training samples of a client: what the split gave it, or what its site reported."""
        if self.assembled is not None:
            return len(self.assembled.world.train[client])
        name = self.agreed.sites[client]
        answer = self.roster.answers.get(name)
        if answer is not None and answer.facts is not None:
            before = self.agreed.counts.get(name)
            self._note_facts(name, answer.facts)
            if self.agreed.counts.get(name) != before:
                self._write_split()
        return self.agreed.samples.get(name, 0)

    def _note_facts(self, name: str, facts: SiteFacts) -> None:
        """Keep what a site reported about its data."""
        self.agreed.samples[name] = facts.samples
        if self.hosting.profile and facts.counts is not None:
            self.agreed.counts[name] = dict(zip(facts.labels, facts.counts, strict=True))

    def _write_split(self) -> None:
        """Write who has which classes for `fedskew watch`, if that is known: by the split, or as sites told it."""
        if self.assembled is not None:
            data = self.assembled.data
            write_split(self.path, class_table(self.assembled.partition, data.y_train, data.classes))
        elif self.agreed.counts and self.agreed.task is not None:
            silent = [name for name in self.agreed.sites if name not in self.agreed.counts]
            note = "As the sites told it; a class with few samples is told as none."
            note += f" Not told by {', '.join(silent)}." if silent else ""
            table = profile.told_table(self.agreed.task.labels, self.agreed.sites, self.agreed.counts)
            write_split(self.path, table, note)

    def _skew(self) -> dict[str, float | None]:
        """How skewed the clients are: by the split, or by what sites told about their labels."""
        if self.assembled is not None:
            return skew_figures(self.assembled)
        labels = self.agreed.task.labels if self.agreed.task is not None else ()
        samples = {name: self.agreed.samples.get(name, 0) for name in self.agreed.sites}
        return profile.skew_between(labels, self.agreed.counts, samples)

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
        return {"sites": self.agreed.sites, "labels": list(self._card().labels), "skew": self._skew()}

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

    def _warn_of_certificates(self) -> None:
        """Say once a day which certificates expire soon."""
        if self.warned != (today := time.strftime("%F")):
            self.warned = today
            for warning in filter(None, (expiry_warning(*entry) for entry in self.certificates.items())):
                self.say(warning)

    def write_status(self, over: bool = False) -> None:
        """Write status.json for `fedskew status`."""
        self._warn_of_certificates()
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
            certificates=self.certificates,
        )
        write_atomically(self.path / STATUS, msgspec.json.encode(status))

    def close(self) -> None:
        """End the connection to the sites, and unlock the run's directory."""
        self.channel.close()
        shutil.rmtree(self.path / SPOOL, ignore_errors=True)
        assert self.directory is not None
        self.directory.close()
