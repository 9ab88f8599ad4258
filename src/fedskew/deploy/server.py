"""`fedskew serve`: the server's side of a run between sites."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.sources.loading import load
from fedskew.deploy import handshake
from fedskew.deploy.child import Child
from fedskew.deploy.deployment import Deployment
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import Answer, Ask, Task
from fedskew.deploy.roster import Channel, Roster
from fedskew.experiment.assemble import Lineup, assemble, line_up
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import BaseRun
from fedskew.experiment.run_directory import RunDirectory, versions
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.federation.wire import digest
from fedskew.federation.world import World

START = 120.0  # seconds for Flower to start
BROUGHT = "sites"  # the name of data that the sites bring


class Agreed(msgspec.Struct):
    """deployment.json: what is fixed for the whole run beside its settings."""

    run: str  # hexadecimal; names the run in every message
    sites: list[str]  # in the order of their client numbers
    task: Task | None = None  # where sites bring their data: what these have in common
    server_data: str = ""


class Served(BaseRun):
    """A run between sites: iterate over it for records, as over `Run`.

    `out` is the run's directory, `say` prints a line for the operator, `resume` continues the run in `out`.
    `channel` starts the connection to the sites; tests put something else in Flower's place.
    """

    def __init__(
        self,
        experiment: Experiment,
        hosting: Hosting,
        out: Path,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        channel: Callable[[Header, Path], Channel] = lambda config, log: Child("link", config, log),
    ) -> None:
        if experiment.method.pooled:
            raise UsageError(
                f"method {experiment.method_name} trains on all data in one place, and sites keep theirs: "
                "use `fedskew run`."
            )
        self.hosting, self.say = hosting, say
        self.brought = experiment.data == BROUGHT
        self.assembled = None if self.brought else assemble(experiment, data_dir=hosting.data_dir)
        config = hosting.config()
        super().__init__(experiment, RunDirectory(out, every=1), resume=resume)
        self.agreed = self._agreed(sorted(config["sites"]), resume)
        self.channel = channel(config, out / "flower.log")
        self.port, self.roster = self._open()

    def _agreed(self, named: list[str], resume: bool) -> Agreed:
        """What was agreed when the run started; for a new run what is known so far."""
        path = self.path / "deployment.json"
        if not resume or not path.exists():
            return Agreed(secrets.token_hex(8), named, server_data=self.hosting.server_data)
        agreed = msgspec.json.decode(path.read_bytes(), type=Agreed)
        if named and named != agreed.sites:
            raise UsageError(f"the run was started with sites {', '.join(agreed.sites)}; the keys are of {named}.")
        return agreed

    @property
    def path(self) -> Path:
        """The run's directory."""
        assert self.directory is not None
        return self.directory.path

    def _open(self) -> tuple[int, Roster]:
        """The port and the roster once Flower's side is up."""
        frame = self.channel.hear(START)
        if frame is None or frame[0]["event"] != "ready":
            self.close()
            why = frame[0].get("text", "") if frame is not None else f"see {self.path / 'flower.log'}"
            raise UsageError(f"Flower's side did not start: {why}.")
        roster = Roster(self.channel, self.agreed.sites, frame[0]["nodes"], self.say, open=self.hosting.insecure)
        return int(frame[0]["port"]), roster

    @property
    def expected(self) -> int:
        """How many sites there should be; 0: not known."""
        split = self.assembled.world.population if self.assembled else 0
        return len(self.agreed.sites) or self.hosting.sites or split

    def __iter__(self) -> Iterator[Record]:
        try:
            if self.result is None:
                self.deployment = self.gather()
                for record in self._carry_out(self.deployment, self.lineup, self._cohort):
                    if self.hosting.insecure:
                        self.roster.greet(self._ask("hello"))
                    yield record
                self._farewell()
        finally:
            self.close()

    def gather(self) -> Deployment:
        """Wait for the sites, and make the federation they are."""
        if not self.expected:
            raise UsageError("say how many sites there are with --sites, as in --sites 3.")
        greeted = self.roster.gather(self._ask("hello"), self.hosting.patience, self.expected)
        for name, answer in sorted(greeted.items()):
            if other := [f"{k} {v}" for k, v in answer.versions.items() if versions().get(k) not in (v, None)]:
                self.say(f"site {name} has {', '.join(other)}: results may not be bit-identical")
        if not self.agreed.sites:
            if len(greeted) < self.expected:
                raise UsageError(f"{len(greeted)} of {self.expected} sites came within {self.hosting.patience:g} s.")
            self.agreed.sites = sorted(greeted)
        self.roster.names = self.agreed.sites
        if self.brought and self.agreed.task is None:
            self.agreed.task = self._agree(greeted)
        write_atomically(self.path / "deployment.json", msgspec.json.encode(self.agreed))
        self.lineup = self._lineup()
        if len(greeted) < self.lineup.quorum:
            raise QuorumLost(
                f"{len(greeted)} of {self.expected} sites came within {self.hosting.patience:g} s, "
                f"{self.lineup.quorum} are needed"
            )
        return self._deployment()

    def _agree(self, greeted: dict[str, Answer]) -> Task:
        facts = {name: answer.facts for name, answer in greeted.items() if answer.facts is not None}
        if not facts:
            raise UsageError(f"no site came within {self.hosting.patience:g} s.")
        return handshake.agree(facts)

    def _lineup(self) -> Lineup:
        count = len(self.agreed.sites)
        if self.assembled is not None:
            if self.assembled.world.population != count:
                raise UsageError(
                    f"the split makes {self.assembled.world.population} clients, but there are {count} sites; "
                    f"give a split with clients={count}."
                )
            return self.assembled
        assert self.agreed.task is not None
        given = load(self.agreed.server_data, self.hosting.data_dir) if self.agreed.server_data else None
        everyone = tuple(range(count))
        size, quorum = line_up(self.experiment, everyone)
        return Lineup(
            world=handshake.server_world(self.experiment, self.agreed.task, given, count, "cpu"),
            members=everyone,
            newcomers=(),
            evaluated=everyone,
            cohort_size=size,
            quorum=quorum,
        )

    def _ask(self, kind: str, world: World | None = None) -> Ask:
        ask = Ask(kind, self.agreed.run, BROUGHT if self.brought else str(self.experiment.data))
        if world is None:
            return ask
        settings = json.loads(json.dumps(self.experiment.as_dict()))
        return msgspec.structs.replace(
            ask, sites=len(self.agreed.sites), settings=settings, task=self.agreed.task, initial=digest(world.initial)
        )

    def _deployment(self) -> Deployment:
        lineup = self.lineup
        deployment = Deployment(
            lineup.world,
            self.roster,
            self._ask("work", lineup.world),
            self.hosting.timeout,
            lineup.evaluated,
            frozenset(lineup.newcomers),
        )
        for record in self.records:
            deployment.commit(record.round, record.trained)
            deployment.pending = record.round if record.metrics is not None else -1
        return deployment

    def _cohort(self, round: int) -> list[int]:
        if self.hosting.choose == "all":
            return self.lineup.cohort(round)
        online = [client for client in self.roster.present() if client in self.lineup.members]
        return draw_cohort(online, self.lineup.cohort_size, self.experiment.seed, round)

    def _keep(self, record: Record) -> None:
        super()._keep(record)
        assert self.directory is not None
        self.deployment.keep = self.directory.previous

    def _closing(self, server: Payload) -> dict[str, list[str]]:
        return {"sites": self.agreed.sites}

    def _farewell(self) -> None:
        done = dict.fromkeys(self.roster.present(), self._ask("done"))
        for _ in self.roster.wave(done, b"", 10.0, sorted(done)):
            pass

    def close(self) -> None:
        """End the connection to the sites, and let others write the run's directory."""
        self.channel.close()
        assert self.directory is not None
        self.directory.close()
