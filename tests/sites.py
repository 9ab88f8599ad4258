"""Roster without a network: the server's link is played by a list of nodes in this process."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.sources.loading import load
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import as_header
from fedskew.deploy.node import Node
from fedskew.deploy.policy import Policy
from fedskew.deploy.server import Served
from fedskew.deploy.states import States
from fedskew.experiment.config import Experiment

NAMES = ("north", "south", "west")
Spoil = Callable[[int, Header, Header, bytes], tuple[Header, bytes] | None]  # (place, ask, answer, payload)


class Played:
    """What Flower's link does, with nodes that answer at once. `spoil` may change an answer, or withhold it (None)."""

    def __init__(self, nodes: list[Node], spoil: Spoil | None = None, *, named: bool = True) -> None:
        self.nodes, self.spoil, self.named = nodes, spoil, named
        self.asked: list[tuple[int, Header]] = []  # (place of the site, header), all of them
        self.forgotten: list[int] = []
        self.closed = False
        self.told: queue.SimpleQueue[tuple[Header, bytes]] = queue.SimpleQueue()
        numbers = {node.name: 100 + place for place, node in enumerate(nodes)} if named else {}
        self.told.put(({"event": "ready", "port": 1, "nodes": numbers}, b""))
        self.told.put(({"event": "nodes", "online": [100 + place for place in range(len(nodes))]}, b""))

    def send(self, header: Header, blob: Any = b"") -> None:
        if header["do"] == "forget":
            self.forgotten.append(header["batch"])
            return
        for number, own in zip(header["to"], header["headers"], strict=True):
            ask: Header = json.loads(json.dumps(own))
            self.asked.append((number - 100, ask))
            answer, payload = self.nodes[number - 100].reply(ask, bytes(blob))
            reply = json.loads(json.dumps(as_header(answer))), bytes(payload)
            sent = self.spoil(number - 100, ask, *reply) if self.spoil is not None else reply
            if sent is not None:
                event = {"event": "reply", "batch": header["batch"], "node": number}
                event |= {"lost": sent[0]["left"]} if "left" in sent[0] else {"header": sent[0]}
                self.told.put((event, sent[1]))

    def receive(self, seconds: float | None = None) -> tuple[Header, bytes] | None:
        return self.told.get(timeout=0.05 if seconds is None else min(seconds, 0.05))

    def close(self) -> None:
        self.closed = True


def few_digits(folder: Path) -> str:
    """A file of 300 digits: the server and all sites read it and split it in the same way."""
    path = folder / "few.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = load("digits")
        np.savez(
            path,
            x_train=data.x_train[:300],
            y_train=data.y_train[:300],
            x_test=data.x_test[:50],
            y_test=data.y_test[:50],
        )
    return str(path)


def nodes_in(folder: Path, data: str | list[str] = "", policy: Policy | None = None) -> list[Node]:
    """Three sites with their folders of states; a site that is made anew finds its old ones."""
    given = [data or few_digits(folder)] * len(NAMES) if isinstance(data, str) else data
    return [
        Node(text, States(folder / name), name=name, policy=policy) for name, text in zip(NAMES, given, strict=True)
    ]


def served(
    experiment: Experiment,
    folder: Path,
    *,
    nodes: list[Node] | None = None,
    spoil: Spoil | None = None,
    said: list[str] | None = None,
    resume: bool = False,
    **hosting: Any,
) -> tuple[Served, Played]:
    """A run between played sites, not begun; its directory is `folder`/run."""
    experiment = replace(experiment, data=few_digits(folder)) if experiment.data == "digits" else experiment
    played = Played(nodes if nodes is not None else nodes_in(folder), spoil, named=not hosting.get("open", False))
    options = {"timeout": 0.5, "patience": 0.5, "sites": len(played.nodes)} | {
        k: v for k, v in hosting.items() if k != "open"
    }
    how = Hosting(insecure=True, **options)
    say = (lambda text: None) if said is None else said.append
    made = Served(experiment, how, folder / "run", say, resume=resume, channel=lambda config, log: played)
    if played.named and not resume:
        made.agreed.sites.extend(node.name for node in played.nodes)  # as if they came with the keys
    return made, played
