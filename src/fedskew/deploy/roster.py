"""The sites as the server sees them: who is who, who is there, and one wave of messages at a time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.messages import Answer, Ask, as_header, read, sane
from fedskew.federation.wire import decode

GREETING = 30.0  # seconds for a site's first answer: it loads its data for it


class Channel(Protocol):
    """Flower's link, or what stands for it in a test."""

    def tell(self, header: Header, blob: Any = b"") -> None: ...

    def hear(self, seconds: float | None = None) -> tuple[Header, bytes] | None: ...

    def close(self) -> None: ...


class Heard(NamedTuple):
    """What came of asking one site: an answer with a payload that could be read, or why there is none."""

    client: int
    answer: Answer | None
    payload: Payload
    why: str = ""


class Roster:
    """`names` in order: a site's place is its client number. `nodes`: where they are, if that is known already."""

    def __init__(
        self,
        link: Channel,
        names: list[str],
        nodes: Mapping[str, int],
        say: Callable[[str], None],
        *,
        open: bool = False,
    ) -> None:
        self.link, self.names, self.say, self.open = link, names, say, open
        self.nodes = dict(nodes)
        self.online: set[int] = set()
        self.ask = 0
        self.inbox: dict[int, tuple[Header, bytes]] = {}  # node -> its reply to the current wave
        self.met: set[int] = set()  # nodes that were greeted

    def client_of(self, node: int) -> int | None:
        name = next((name for name, n in self.nodes.items() if n == node), None)
        return self.names.index(name) if name in self.names else None

    def present(self) -> list[int]:
        """Client numbers of the sites that are online, in order."""
        return [c for c, name in enumerate(self.names) if self.nodes.get(name) in self.online]

    def wave(self, asks: Mapping[int, Ask], blob: Any, seconds: float, order: list[int]) -> Iterator[Heard]:
        """One message to each client of `asks`; what they answered, in the given order, as it is to be had."""
        self.ask += 1
        self.inbox = {}
        there = {client: self.nodes[self.names[client]] for client in asks if self.names[client] in self.nodes}
        headers = [as_header(asks[client]) for client in there]
        self.link.tell({"do": "send", "ask": self.ask, "to": list(there.values()), "headers": headers}, blob)
        deadline = time.monotonic() + seconds
        try:
            for client in order:
                if client not in there:
                    yield Heard(client, None, {}, "has not joined yet")
                    continue
                while there[client] not in self.inbox and (left := deadline - time.monotonic()) > 0:
                    self.listen(left)
                yield self._heard(client, there[client], seconds)
        finally:
            self.link.tell({"do": "forget", "ask": self.ask})

    def _heard(self, client: int, node: int, seconds: float) -> Heard:
        header, blob = self.inbox.pop(node, ({"lost": f"did not answer within {seconds:g} s"}, b""))
        if "lost" in header:
            return Heard(client, None, {}, str(header["lost"]))
        try:
            answer = read(header["header"], Answer)
            return Heard(client, answer, decode(blob) if blob else {}, answer.lost or sane(answer))
        except Exception as error:  # whatever a site may send
            return Heard(client, None, {}, f"sent something that is no reply: {type(error).__name__}: {error}"[:300])

    def listen(self, seconds: float) -> None:
        """Deal with what the link tells next, if it tells anything for so long."""
        try:
            frame = self.link.hear(min(seconds, 1.0))
        except queue.Empty:
            return
        if frame is None:
            raise UsageError("Flower's side ended; its log is in the run's directory.")
        header, blob = frame
        match header["event"]:
            case "reply":
                if header["ask"] == self.ask:
                    self.inbox[header["node"]] = (header, blob)
            case "nodes":
                self._moved(set(header["online"]))
            case "late":
                self.say(f"site {self._name(header['node'])} answered too late: dropped")
            case "note":
                self.say(header["text"])
            case _:
                raise UsageError(f"{header['text']}.")

    def _moved(self, online: set[int]) -> None:
        for node in sorted(online - self.online):
            if self.client_of(node) is not None:
                self.say(f"site {self._name(node)} is there")
        for node in sorted(self.online - online):
            if self.client_of(node) is not None:
                self.say(f"site {self._name(node)} is gone")
        self.online = online

    def _name(self, node: int) -> str:
        return next((name for name, n in self.nodes.items() if n == node), f"node {node}")

    def gather(self, hello: Ask, patience: float, expected: int) -> dict[str, Answer]:
        """Greet sites as they come, until `expected` have answered or patience ends: name -> first answer."""
        greeted: dict[str, Answer] = {}
        deadline = time.monotonic() + patience
        while len(greeted) < expected and time.monotonic() < deadline:
            self.listen(0.2)
            greeted |= self.greet(hello)
        return greeted

    def greet(self, hello: Ask) -> dict[str, Answer]:
        """Greet who is online and was not greeted yet. Without keys this is where a node's name comes from."""
        new = sorted(self.online - self.met)
        if not new:
            return {}
        self.ask += 1
        self.inbox = {}
        self.link.tell({"do": "send", "ask": self.ask, "to": new, "headers": [as_header(hello)] * len(new)})
        deadline = time.monotonic() + GREETING
        while not set(new) <= self.inbox.keys() and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        self.met |= set(new)
        return dict(filter(None, (self._welcome(node, self._heard(-1, node, GREETING)) for node in new)))

    def _welcome(self, node: int, heard: Heard) -> tuple[str, Answer] | None:
        """The name under which a greeted node takes part, and what it said."""
        name = heard.answer.name if self.open and heard.answer is not None else self._name(node)
        if heard.why or heard.answer is None:
            self.say(f"site {name} {heard.why}")
            return None
        if self.open:
            if self.nodes.get(name, node) in self.online - {node}:
                self.say(f"refused a second site called {name!r}: give each a --name of its own")
                return None
            self.nodes[name] = node
        return name, heard.answer
