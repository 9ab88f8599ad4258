"""`fedskew join`: one site of a run. Its data and its net stay loaded; requests arrive through Flower."""

from __future__ import annotations

import json
import os
import queue
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import SOURCES, load
from fedskew.deploy import handshake
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.messages import Answer, Request, SiteFacts, as_header, plain_counts, plain_score, read
from fedskew.deploy.states import States
from fedskew.evaluation.scores import ClientScore
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run_directory import versions
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, perform
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, digest, encode
from fedskew.federation.world import World

LAST_REPLY_SECONDS = 10.0  # time to wait until the server has the last reply of a run


class Node:
    """Answers the requests of a server. An answer depends only on the request, the data and the states on disk.

    `data` is a path or the name of a data set, `states` holds the client states of this site, `name` is the name of
    the site, and `data_dir` is where named data sets are (None: the default folder).
    """

    def __init__(
        self, data: str, states: States, *, name: str = "", data_dir: Path | None = None, device: str = "cpu"
    ) -> None:
        self.data, self.states, self.name, self.data_dir, self.device = data, states, name, data_dir, device
        self.loaded: DataSet | None = None
        self.cached: tuple[str, World] | None = None  # the world of the last request, and the settings that made it

    def reply(self, header: Header, blob: bytes) -> tuple[Answer, Blob]:
        """(answer, payload of the update) to one request. An error becomes an answer, so that the site stays up."""
        try:
            request = read(header, Request)
            if not re.fullmatch("[0-9a-f]{8,64}", request.run):
                raise UsageError("the request does not name a run")
            if request.kind == "work":
                return self._work(request, decode(blob))
            return Answer(name=self.name, versions=versions(), facts=self._facts(request)), b""
        except (ValueError, OSError) as error:  # includes UsageError and Damaged
            return Answer(lost=f"cannot take part: {error}", name=self.name), b""

    def _facts(self, request: Request) -> SiteFacts | None:
        uses_own = request.kind == "hello" and self._uses_own_data(request)
        return handshake.facts_of(self._own_data()) if uses_own else None

    def _uses_own_data(self, request: Request) -> bool:
        """Whether sites bring their own data in this run. A site loads only data that its operator named."""
        if request.data == "sites":
            return True
        if self.data != request.data:
            raise UsageError(f"this run splits {request.data}, but this site joined with --data {self.data}")
        return False

    def _own_data(self) -> DataSet:
        if self.loaded is None:
            self.loaded = load(self.data, self.data_dir)
        return self.loaded

    def world(self, request: Request) -> World:
        """The world of the request's settings; cached until a request has other settings."""
        settings = Request(
            "", "", request.data, request.client, request.sites, settings=request.settings, task=request.task
        )
        key = json.dumps(as_header(settings))
        if self.cached is None or self.cached[0] != key:
            self.cached = (key, self._make_world(request, from_dict(request.settings)))
        return self.cached[1]

    def _make_world(self, request: Request, experiment: Experiment) -> World:
        if self._uses_own_data(request):
            if request.task is None:
                raise UsageError("the request does not contain the common task of the sites")
            world = handshake.site_world(
                experiment, request.task, self._own_data(), request.client, request.sites, self.device
            )
        else:
            world = assemble(experiment, data_dir=self.data_dir, device=self.device).world
            if world.population != request.sites:
                raise UsageError(f"the split has {world.population} clients, but there are {request.sites} sites")
        if digest(world.initial) != request.initial:
            installed = ", ".join(f"{name} {version}" for name, version in versions().items())
            raise UsageError(
                f"its initial model differs from the server's although the settings are the same; it has {installed}"
            )
        return world

    def _work(self, request: Request, broadcast: Payload) -> tuple[Answer, Blob]:
        world = self.world(request)
        state = self.states.get(request.run, request.base)
        answer = Answer(name=self.name)
        client = request.client
        if request.evaluate_round >= 0:
            job = Job("evaluate_client", request.evaluate_round, "evaluate", client, trained=request.base >= 0)
            score = self._perform(world, job, broadcast, state)
            if isinstance(score, ClientScore):
                answer.shared, answer.personal = plain_score(score.shared), plain_score(score.personal)
                answer.counts = plain_counts(score) if request.counts else []
        if not request.train:
            return answer, b""
        if not len(world.train[client]):
            answer.lost = "has no training data"
            return answer, b""
        result = self._perform(world, Job("train", request.round, request.stage, client), broadcast, state)
        if isinstance(result, Lost):
            answer.lost = result.why
            return answer, b""
        assert isinstance(result, Trained)
        self.states.settle(request.run, request.base, request.keep)
        self.states.put(request.run, request.round, result.state)
        answer.weight, answer.metrics, answer.seconds = result.update.weight, result.update.metrics, result.seconds
        return answer, encode(result.update.payload)

    @staticmethod
    def _perform(world: World, job: Job, broadcast: Payload, state: Blob) -> Result:
        torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
        return perform(world, job, broadcast, state)


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and the keys to connect with."""

    server: str  # HOST:PORT
    ca: str = ""  # the authority's certificate, PEM text; "" if insecure
    key: str = ""  # the site's private key, PEM text; "" creates one for this session (insecure only)
    insecure: bool = False  # without TLS

    def config(self) -> Header:
        """The first message to deploy/flower/carrier.py."""
        return {"server": self.server, "ca": self.ca, "key": self.key, "insecure": self.insecure}


def server_address(server: str, certs: Path | None, insecure: bool) -> ServerAddress:
    """The address `server` (HOST:PORT) with the keys in the folder `certs`, which is None if `insecure`."""
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--server {server} is invalid: expected HOST:PORT, as in fl.example.org:8470.")
    if insecure:
        if certs is not None:
            raise UsageError("--insecure and --certs exclude each other: give one of them.")
        return ServerAddress(server, insecure=True)
    if certs is None:
        raise UsageError("give this site's folder of keys with --certs (see `fedskew certs`), or use --insecure.")
    try:
        return ServerAddress(server, (certs / "ca.crt").read_text(), (certs / "site.key").read_text())
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {error.strerror}; --certs expects the folder of a site."
        ) from None


def lock_states(folder: Path) -> filelock.BaseFileLock:
    """Create and lock the folder of a site's states, for this user and process only. Release the lock at the end."""
    os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except OSError as error:
        if isinstance(error, filelock.Timeout):
            raise UsageError(
                f"{folder} is in use by another `fedskew join`; each site needs its own --state."
            ) from None
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from None
    return lock


def check_data(text: str, data_dir: Path | None) -> None:
    """Load data given as a path once, so that an error in them raises UsageError before the site joins."""
    if text in SOURCES or not text:
        return
    load(text, data_dir)


def join(node: Node, address: ServerAddress, *, stay: bool, say: Callable[[str], None]) -> None:
    """Answer the requests of a server until the run is over; with `stay`, until Ctrl-C.

    `say` prints a line for the operator.
    """
    log = node.states.folder / "flower.log"
    process = FlowerProcess("carrier", address.config(), log)
    over = False
    try:
        while True:
            try:
                frame = process.receive(LAST_REPLY_SECONDS if over else None)
            except queue.Empty:  # the server ended before it confirmed the last reply
                frame = {"event": "delivered"}, b""
            if frame is None:
                raise UsageError(f"the Flower process ended; see {log}.")
            header, blob = frame
            match header["event"]:
                case "request":
                    answer, payload = node.reply(header["header"], blob)
                    if answer.lost:
                        say(answer.lost)
                    process.send(as_header(answer), payload)
                    over = header["header"].get("kind") == "done" and not stay
                case "delivered":
                    if over:
                        say("the run is over")
                        return
                case "joined":
                    say(f"ready: joined {address.server}")
                case "trouble":
                    say(header["text"])
                case _:
                    raise UsageError(f"{header['text']}.")
    finally:
        process.close()
