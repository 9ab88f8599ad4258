"""`fedskew serve`: the server's side of a run between sites."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.sources.loading import load
from fedskew.deploy import handshake as own
from fedskew.deploy.child import Child
from fedskew.deploy.deployment import Deployment
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import Answer, Ask, Task
from fedskew.deploy.node import versions
from fedskew.deploy.roster import Link, Sites
from fedskew.experiment.assemble import Assembled, assemble, part_of
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.run import ended
from fedskew.experiment.run_directory import RunDirectory
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.loop import run
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.federation.wire import digest
from fedskew.federation.world import World

START = 120.0  # seconds for Flower to start
BROUGHT = "sites"  # the name of data that the sites bring


class Facts(msgspec.Struct):
    """deployment.json: what is fixed for the whole run beside its settings."""

    run: str
    sites: list[str]  # in the order of their client numbers
    task: Task | None = None  # where sites bring their data
    server_data: str = ""


class Served:
    """A run between sites: iterate over it for records, as over `Run`. `link` stands for Flower's in tests."""

    def __init__(
        self,
        experiment: Experiment,
        hosting: Hosting,
        out: Path,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        link: Callable[[Header, Path], Link] = lambda config, log: Child("link", config, log),
    ) -> None:
        if experiment.method.pooled:
            raise UsageError(
                f"method {experiment.method_name} has all data in one place, and sites keep theirs: use `fedskew run`."
            )
        self.experiment, self.hosting, self.say = experiment, hosting, say
        self.brought = experiment.data == BROUGHT
        self.partition = None if self.brought else assemble(experiment, data_dir=hosting.data_dir)
        config = hosting.config()
        self.directory = RunDirectory(out, every=1)
        self.start: tuple[int, Payload] | None = None
        self.troubles: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.facts = Facts(secrets.token_hex(8), sorted(config["sites"]), server_data=hosting.server_data)
        if resume:
            self._restore()
        else:
            self.directory.begin(experiment.to_toml())
        self.rounds = len(experiment.method.stages(experiment.rounds))
        self.link = link(config, out / "flower.log")
        self.port, self.sites = self._open(config)

    def _restore(self) -> None:
        named = self.facts.sites
        self.start, self.troubles = self.directory.restore()
        self.records = whole(self.directory.read_records())
        path = self.directory.path / "deployment.json"
        if path.exists():
            self.facts = msgspec.json.decode(path.read_bytes(), type=Facts)
            if named and named != self.facts.sites:
                raise UsageError(
                    f"the run was begun with sites {', '.join(self.facts.sites)}; the keys are of {named}."
                )
        if self.start and self.start[0] >= len(self.experiment.method.stages(self.experiment.rounds)):
            self.result = self.directory.result()

    def _open(self, config: Header) -> tuple[int, Sites]:
        """Flower's side is up, or there is a sentence about why not."""
        frame = self.link.hear(START)
        if frame is None or frame[0]["event"] != "ready":
            self.close()
            why = frame[0].get("text", "") if frame is not None else f"see {self.directory.path / 'flower.log'}"
            raise UsageError(f"Flower's side did not start: {why}.")
        sites = Sites(self.link, self.facts.sites, frame[0]["nodes"], self.say, open=self.hosting.insecure)
        return int(frame[0]["port"]), sites

    @property
    def expected(self) -> int:
        return len(self.facts.sites) or self.hosting.sites or (self.partition.world.population if self.partition else 0)

    def __iter__(self) -> Iterator[Record]:
        try:
            if not self.result:
                yield from self._rounds(self.gather())
                self._farewell()
        finally:
            self.close()

    def gather(self) -> Deployment:
        """Wait for the sites, and make the federation they are."""
        if not self.expected:
            raise UsageError("say how many sites there are with --sites, as in --sites 3.")
        greeted = self.sites.gather(self._ask("hello"), self.hosting.patience, self.expected)
        for name, answer in sorted(greeted.items()):
            if other := [f"{k} {v}" for k, v in answer.versions.items() if versions().get(k) not in (v, None)]:
                self.say(f"site {name} has {', '.join(other)}: its bits may come out otherwise")
        if not self.facts.sites:
            if len(greeted) < self.expected:
                raise UsageError(f"{len(greeted)} of {self.expected} sites came within {self.hosting.patience:g} s.")
            self.facts.sites = sorted(greeted)
        self.sites.names = self.facts.sites
        if self.brought and self.facts.task is None:
            self.facts.task = self._agree(greeted)
        write_atomically(self.directory.path / "deployment.json", msgspec.json.encode(self.facts))
        setting = self._setting()
        if len(greeted) < setting.quorum:
            raise QuorumLost(
                f"{len(greeted)} of {self.expected} sites came within {self.hosting.patience:g} s, "
                f"{setting.quorum} are needed"
            )
        return self._deployment(setting)

    def _agree(self, greeted: dict[str, Answer]) -> Task:
        told = {name: answer.facts for name, answer in greeted.items() if answer.facts is not None}
        if not told:
            raise UsageError(f"no site came within {self.hosting.patience:g} s.")
        return own.agree(told)

    def _setting(self) -> Assembled:
        count = len(self.facts.sites)
        if self.partition is not None:
            if self.partition.world.population != count:
                raise UsageError(
                    f"the split makes {self.partition.world.population} clients, but there are {count} sites; "
                    f"give a split with clients={count}."
                )
            return self.partition
        assert self.facts.task is not None
        experiment, hosting = self.experiment, self.hosting
        given = load(self.facts.server_data, hosting.data_dir) if self.facts.server_data else None
        world = own.server_world(experiment, self.facts.task, given, count, "cpu")
        everyone = tuple(range(count))
        size = part_of(experiment.clients_per_round, count, "clients_per_round")
        quorum = part_of(experiment.trouble.quorum, size, "quorum")
        cohort = partial(draw_cohort, everyone, size, experiment.seed)
        return Assembled(world, None, None, everyone, (), everyone, cohort, size, quorum)  # type: ignore[arg-type]

    def _ask(self, kind: str, world: World | None = None) -> Ask:
        ask = Ask(kind, self.facts.run, BROUGHT if self.brought else str(self.experiment.data))
        if world is None:
            return ask
        settings = json.loads(json.dumps(self.experiment.as_dict()))
        return msgspec.structs.replace(
            ask, sites=len(self.facts.sites), settings=settings, task=self.facts.task, initial=digest(world.initial)
        )

    def _deployment(self, setting: Assembled) -> Deployment:
        self.setting = setting
        deployment = Deployment(
            setting.world,
            self.sites,
            self._ask("work", setting.world),
            self.hosting.timeout,
            setting.judged,
            frozenset(setting.newcomers),
        )
        for record in self.records:
            deployment.commit(record["round"], record["trained"])
            deployment.pending = record["round"] if record["metrics"] is not None else -1
        return deployment

    def _cohort(self, round: int) -> list[int]:
        if self.hosting.choose == "all":
            return self.setting.cohort(round)
        there = [client for client in self.sites.present() if client in self.setting.members]
        return draw_cohort(there, self.setting.cohort_size, self.experiment.seed, round)

    def _rounds(self, deployment: Deployment) -> Iterator[Record]:
        every = self.experiment.evaluation.every
        last: tuple[int, Payload] | None = None if self.start is None else (self.start[0] - 1, self.start[1])
        for record in run(
            self.experiment.method,
            deployment,
            self.setting.world.server_site,
            self.experiment.rounds,
            self._cohort,
            quorum=self.setting.quorum,
            evaluate=lambda round: (round + 1) % every == 0 or round == self.rounds - 1,
            start=self.start,
        ):
            last = (record.round, record.server)
            told = record.as_dict()
            if deployment.before is not None:
                told["before"] = {word: deployment.before[word] for word in ("clients", "new")}
            self.directory.append(told)
            self.directory.save(*last)
            deployment.keep = self.directory.previous
            self.records = whole([*self.records, told])
            if self.hosting.insecure:
                self.sites.greet(self._ask("hello"))
            yield record
        if last is not None:
            self._finish(last[1], deployment)

    def _finish(self, server: Payload, deployment: Deployment) -> None:
        model, result = ended(self.experiment, self.records, server, deployment.world.initial)
        self.result = result | {"clients": deployment.per_client(), "sites": self.facts.sites}
        self.directory.finish(server, model, self.result)

    def _farewell(self) -> None:
        done = dict.fromkeys(self.sites.present(), self._ask("done"))
        for _ in self.sites.wave(done, b"", 10.0, sorted(done)):
            pass

    def close(self) -> None:
        self.link.close()
        self.directory.close()


def whole(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records as they were written, each with the clients' figures, which the next one told."""
    made: list[dict[str, Any]] = []
    for record in records:
        if (before := record.get("before")) and made:
            made[-1]["metrics"] = made[-1]["metrics"] | before
        made.append({key: value for key, value in record.items() if key != "before"})
    return made


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a served run."""
    return whole(json.loads(line) for line in (path / "records.jsonl").read_text().splitlines())


def taken_up(path: Path) -> Experiment:
    """The experiment of a run that is to go on."""
    if not (path / "settings.toml").exists():
        raise UsageError(f"{path} holds no run: there is no settings.toml in it.")
    return from_dict(read_toml(path / "settings.toml"))
