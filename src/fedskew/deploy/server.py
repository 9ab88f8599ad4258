"""`fedskew serve`: the server of a run between sites."""

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
from fedskew.deploy.deployment import Deployment
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import Request, Task
from fedskew.deploy.roster import Channel, Roster
from fedskew.experiment.assemble import Lineup, assemble, cohort_size_and_quorum
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import BaseRun
from fedskew.experiment.run_directory import RunDirectory, versions
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.federation.wire import digest
from fedskew.federation.world import World

START_SECONDS = 120.0  # time Flower has to start
DONE_SECONDS = 10.0  # time to wait for the sites at the end of a run
OWN_DATA = "sites"  # the setting `data` of a run in which sites bring their own data


class Agreed(msgspec.Struct):
    """What server and sites agreed on at the start of a run, besides its settings: deployment.json."""

    run: str  # identifies the run in every request; hexadecimal
    sites: list[str]  # names, in the order of their client numbers
    task: Task | None = None  # if sites bring their own data
    server_data: str = ""  # see Hosting


class Served(BaseRun):
    """A run between sites. Iterate over it for its records, as over `Run`.

    Args:
        experiment: the settings of the run.
        hosting: address, keys and timeouts of the server.
        out: the run's directory.
        say: prints a line for the operator.
        resume: continue the run in `out`.
        channel: starts the Flower process with a config and a log file; tests replace it.
    """

    def __init__(
        self,
        experiment: Experiment,
        hosting: Hosting,
        out: Path,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        channel: Callable[[Header, Path], Channel] = lambda config, log: FlowerProcess("link", config, log),
    ) -> None:
        if experiment.method.pooled:
            raise UsageError(
                f"method {experiment.method_name} trains on all data in one place, but sites keep their data: "
                "use `fedskew run`."
            )
        if experiment.stop.patience:
            raise UsageError("stop is for simulated runs: between sites a round's figures arrive one round later.")
        self.hosting, self.say = hosting, say
        self.own_data = experiment.data == OWN_DATA
        self.assembled = None if self.own_data else assemble(experiment, data_dir=hosting.data_dir)
        config = hosting.config()
        super().__init__(experiment, RunDirectory(out, every=1), resume=resume)
        self.agreed = self._read_agreed(sorted(config["sites"]), resume)
        self.channel = channel(config, out / "flower.log")
        self.port, self.roster = self._open()

    def _read_agreed(self, keys: list[str], resume: bool) -> Agreed:
        """What was agreed when the run started; for a new run what is known so far. `keys` are the names of keys."""
        path = self.path / "deployment.json"
        if not resume or not path.exists():
            return Agreed(secrets.token_hex(8), keys, server_data=self.hosting.server_data)
        agreed = msgspec.json.decode(path.read_bytes(), type=Agreed)
        if keys and keys != agreed.sites:
            raise UsageError(
                f"the run was started with the sites {', '.join(agreed.sites)}, but --certs has keys of "
                f"{', '.join(keys)}; give the folder that the run was started with."
            )
        return agreed

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
        roster = Roster(self.channel, self.agreed.sites, frame[0]["nodes"], self.say, keyless=self.hosting.insecure)
        return int(frame[0]["port"]), roster

    @property
    def expected(self) -> int:
        """How many sites should join; 0 if that is not known."""
        split = self.assembled.world.population if self.assembled else 0
        return len(self.agreed.sites) or self.hosting.sites or split

    def __iter__(self) -> Iterator[Record]:
        try:
            if self.result is None:
                self.deployment = self.gather()
                for record in self._carry_out(self.deployment, self.lineup, self._cohort):
                    if self.hosting.insecure:
                        self.roster.greet(self._request("hello"))
                    yield record
                self._say_done()
        finally:
            self.close()

    def gather(self) -> Deployment:
        """Wait for the sites to join, agree with them on the task, and return the federation."""
        if not self.expected:
            raise UsageError("give the number of sites with --sites, as in --sites 3.")
        patience = self.hosting.patience
        answers = self.roster.gather(self._request("hello"), patience, self.expected)
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
            facts = {name: answer.facts for name, answer in answers.items() if answer.facts is not None}
            if not facts:
                raise UsageError(f"no site joined within {patience:g} s; give more time with --patience.")
            self.agreed.task = handshake.agree(facts)
        write_atomically(self.path / "deployment.json", msgspec.json.encode(self.agreed))
        self.lineup = self._make_lineup()
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

    def _request(self, kind: str, world: World | None = None) -> Request:
        """A request without the fields of a round; with `world`, it contains the settings of the run."""
        request = Request(kind, self.agreed.run, OWN_DATA if self.own_data else str(self.experiment.data))
        if world is None:
            return request
        return msgspec.structs.replace(
            request,
            sites=len(self.agreed.sites),
            settings=json.loads(json.dumps(self.experiment.as_dict())),
            task=self.agreed.task,
            initial=digest(world.initial),
        )

    def _make_deployment(self) -> Deployment:
        """The federation in the state in which the records so far left it."""
        lineup = self.lineup
        deployment = Deployment(
            world=lineup.world,
            roster=self.roster,
            request=self._request("work", lineup.world),
            timeout=self.hosting.timeout,
            evaluated=lineup.evaluated,
            newcomers=frozenset(lineup.newcomers),
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

    def _say_done(self) -> None:
        """Send the sites that are online the end of the run."""
        requests = dict.fromkeys(self.roster.present(), self._request("done"))
        for _ in self.roster.exchange(requests, b"", DONE_SECONDS, sorted(requests)):
            pass

    def close(self) -> None:
        """End the connection to the sites, and unlock the run's directory."""
        self.channel.close()
        assert self.directory is not None
        self.directory.close()
