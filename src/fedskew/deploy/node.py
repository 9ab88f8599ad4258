"""`fedskew join`: one site. Its data and its net stay loaded; messages come in through Flower's carrier."""

from __future__ import annotations

import json
import os
import queue
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import SOURCES, load
from fedskew.deploy import handshake
from fedskew.deploy.child import Child
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.messages import Answer, Ask, as_header, plain_score, read
from fedskew.deploy.states import States
from fedskew.evaluation.scores import ClientScore
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run_directory import versions
from fedskew.federation.simulate.jobs import Job, Lost, Trained, perform
from fedskew.federation.store import Blob
from fedskew.federation.wire import decode, digest, encode
from fedskew.federation.world import World

LAST = 10.0  # seconds for the last reply of a run to arrive


class Node:
    """What a site does with a message: a pure function of the message, its data and its states on disk."""

    def __init__(
        self, data: str, states: States, *, name: str = "", data_dir: Path | None = None, device: str = "cpu"
    ) -> None:
        self.data, self.states, self.name, self.data_dir, self.device = data, states, name, data_dir, device
        self.loaded: DataSet | None = None
        self.known: tuple[str, World] | None = None  # the last message's settings, and the world they make

    def reply(self, header: Header, blob: bytes) -> tuple[Answer, Blob]:
        """The answer to one message. What fails is told, in a sentence; this site stays up."""
        try:
            ask = read(header, Ask)
            if not re.fullmatch("[0-9a-f]{8,64}", ask.run):
                raise UsageError("the message names no run")
            if ask.kind == "work":
                return self._work(ask, decode(blob))
            return Answer(name=self.name, versions=versions(), facts=self._facts(ask)), b""
        except (ValueError, OSError) as error:  # UsageError and Damaged among them
            return Answer(lost=f"cannot take part: {error}", name=self.name), b""

    def _facts(self, ask: Ask) -> Any:
        return handshake.facts_of(self._own_data()) if ask.kind == "hello" and self._brings(ask) else None

    def _brings(self, ask: Ask) -> bool:
        """Whether this run is on the sites' own data. A site never loads what its operator did not name."""
        if ask.data == "sites":
            return True
        if self.data != ask.data:
            raise UsageError(f"this run deals parts of {ask.data}, but this site joined with --data {self.data}")
        return False

    def _own_data(self) -> DataSet:
        if self.loaded is None:
            self.loaded = load(self.data, self.data_dir)
        return self.loaded

    def world(self, ask: Ask) -> World:
        """The world the message's settings make; kept for the next message."""
        key = json.dumps(as_header(Ask("", "", ask.data, ask.client, ask.sites, settings=ask.settings, task=ask.task)))
        if self.known is None or self.known[0] != key:
            experiment = from_dict(ask.settings)
            self.known = (key, self._make(ask, experiment))
        return self.known[1]

    def _make(self, ask: Ask, experiment: Experiment) -> World:
        if self._brings(ask):
            if ask.task is None:
                raise UsageError("the message does not say what the sites' data have in common")
            world = handshake.site_world(experiment, ask.task, self._own_data(), ask.client, ask.sites, self.device)
        else:
            world = assemble(experiment, data_dir=self.data_dir, device=self.device).world
            if world.population != ask.sites:
                raise UsageError(f"the split makes {world.population} clients, but there are {ask.sites} sites")
        if digest(world.initial) != ask.initial:
            mine = ", ".join(f"{name} {version}" for name, version in versions().items())
            raise UsageError(f"its initial model is not the server's, though the settings are the same; it has {mine}")
        return world

    def _work(self, ask: Ask, broadcast: Payload) -> tuple[Answer, Blob]:
        world = self.world(ask)
        state = self.states.get(ask.run, ask.base)
        answer = Answer(name=self.name)
        if ask.judge >= 0:
            score = self._perform(
                world,
                Job("evaluate_client", ask.judge, "evaluate", ask.client, trained=ask.base >= 0),
                broadcast,
                state,
            )
            if isinstance(score, ClientScore):
                answer.shared, answer.personal = plain_score(score.shared), plain_score(score.personal)
        if not ask.train:
            return answer, b""
        if not len(world.train[ask.client]):
            answer.lost = "has no training data"
            return answer, b""
        result = self._perform(world, Job("train", ask.round, ask.stage, ask.client), broadcast, state)
        if isinstance(result, Lost):
            answer.lost = result.why
            return answer, b""
        assert isinstance(result, Trained)
        self.states.settle(ask.run, ask.base, ask.keep)
        self.states.put(ask.run, ask.round, result.state)
        answer.weight, answer.metrics, answer.seconds = result.update.weight, result.update.metrics, result.seconds
        return answer, encode(result.update.payload)

    @staticmethod
    def _perform(world: World, job: Job, broadcast: Payload, state: Blob) -> Any:
        torch.set_num_threads(1)  # a thread more or less changes sums
        return perform(world, job, broadcast, state)


@dataclass(frozen=True)
class Door:
    """How a site gets to its server."""

    server: str
    ca: str = ""  # PEM text
    key: str = ""  # PEM text; '' makes one for this session (insecure only)
    insecure: bool = False

    def config(self) -> Header:
        return {"server": self.server, "ca": self.ca, "key": self.key, "insecure": self.insecure}


def open_door(server: str, certs: Path | None, insecure: bool) -> Door:
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--server {server} will not do: give HOST:PORT, as in fl.example.org:8470.")
    if insecure:
        if certs is not None:
            raise UsageError("--insecure and --certs exclude each other: give one.")
        return Door(server, insecure=True)
    if certs is None:
        raise UsageError("give this site's folder of keys with --certs (see `fedskew certs`), or say --insecure.")
    try:
        return Door(server, (certs / "ca.crt").read_text(), (certs / "site.key").read_text())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}; --certs needs a site's folder.") from None


def lock_states(folder: Path) -> filelock.BaseFileLock:
    """The states are private to this user, and to one process."""
    os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except OSError as error:
        if isinstance(error, filelock.Timeout):
            raise UsageError(
                f"{folder} is in use by another `fedskew join`; give each site a --state of its own."
            ) from None
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from None
    return lock


def check_data(text: str, data_dir: Path | None) -> None:
    """Data that cannot be used are a mistake now, not in the first round."""
    if text in SOURCES or not text:
        return
    load(text, data_dir)


def join(node: Node, door: Door, *, stay: bool, say: Callable[[str], None]) -> None:
    """Serve one site until the run is over (or, with `stay`, until Ctrl-C)."""
    child = Child("carrier", door.config(), node.states.folder / "flower.log")
    over = False
    try:
        while True:
            try:
                frame = child.hear(LAST if over else None)
            except queue.Empty:  # the server did not wait for our last word
                frame = {"event": "delivered"}, b""
            if frame is None:
                raise UsageError(f"Flower's side ended; see {node.states.folder / 'flower.log'}.")
            header, blob = frame
            match header["event"]:
                case "ask":
                    answer, payload = node.reply(header["header"], blob)
                    if answer.lost:
                        say(answer.lost)
                    child.tell(as_header(answer), payload)
                    over = header["header"].get("kind") == "done" and not stay
                case "delivered":
                    if over:
                        say("the run is over")
                        return
                case "joined":
                    say(f"ready: joined {door.server}")
                case "trouble":
                    say(header["text"])
                case _:
                    raise UsageError(f"{header['text']}.")
    finally:
        child.close()
