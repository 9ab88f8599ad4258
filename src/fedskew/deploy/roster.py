"""The sites as the server sees them: their names and nodes, who is online, and the exchange of messages with them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.messages import Answer, Request, as_header, problem_in, read
from fedskew.federation.wire import decode

HELLO_SECONDS = 30.0  # time a site has for its first answer; it may load its data meanwhile


class Channel(Protocol):
    """The connection to the process with Flower's server (deploy/flower/link.py); tests replace it."""

    def send(self, header: Header, blob: Any = b"") -> None:
        """Send one message to the process."""
        ...

    def receive(self, seconds: float | None = None) -> tuple[Header, bytes] | None:
        """The next message; None if the process has ended. Raises queue.Empty after `seconds`."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class SiteReply(NamedTuple):
    """The reply of one site: an answer and the payload of its update, or None and the reason."""

    client: int
    answer: Answer | None
    payload: Payload
    why: str = ""  # why the answer cannot be used


class Roster:
    """The sites of a run. A site's client number is the position of its name in `names`.

    `nodes` maps names to Flower's node numbers, as far as they are known. `say` prints a line for the operator. With
    `keyless` any node may join and gives its own name; otherwise a node is identified by its key.
    """

    def __init__(
        self,
        link: Channel,
        names: list[str],
        nodes: Mapping[str, int],
        say: Callable[[str], None],
        *,
        keyless: bool = False,
    ) -> None:
        self.link, self.names, self.say, self.keyless = link, names, say, keyless
        self.nodes = dict(nodes)
        self.online: set[int] = set()  # nodes
        self.greeted: set[int] = set()  # nodes that were sent "hello"
        self.batch = 0  # number of the current batch of requests
        self.inbox: dict[int, tuple[Header, bytes]] = {}  # node -> its reply to the current batch

    def client_of(self, node: int) -> int | None:
        """The client number of a node; None if it is not one of the run's sites."""
        name = next((name for name, n in self.nodes.items() if n == node), None)
        return self.names.index(name) if name in self.names else None

    def present(self) -> list[int]:
        """The client numbers of the sites that are online, in order."""
        return [c for c, name in enumerate(self.names) if self.nodes.get(name) in self.online]

    def exchange(
        self, requests: Mapping[int, Request], blob: Any, seconds: float, order: list[int]
    ) -> Iterator[SiteReply]:
        """Send a request to each client (client -> request), with the same bytes; yields their replies in `order`.

        A client that does not reply within `seconds` gets a reply without an answer.
        """
        nodes = {client: self.nodes[self.names[client]] for client in requests if self.names[client] in self.nodes}
        self._send([(node, requests[client]) for client, node in nodes.items()], blob)
        deadline = time.monotonic() + seconds
        try:
            for client in order:
                if client not in nodes:
                    yield SiteReply(client, None, {}, "has not joined yet")
                    continue
                while nodes[client] not in self.inbox and (left := deadline - time.monotonic()) > 0:
                    self.handle_next(left)
                yield self._reply(client, nodes[client], seconds)
        finally:
            self.link.send({"do": "forget", "batch": self.batch})

    def _send(self, requests: list[tuple[int, Request]], blob: Any = b"") -> None:
        """Send a batch of requests, as (node, request), with the same bytes."""
        self.batch += 1
        self.inbox = {}
        nodes, headers = [node for node, _ in requests], [as_header(request) for _, request in requests]
        self.link.send({"do": "send", "batch": self.batch, "to": nodes, "headers": headers}, blob)

    def _reply(self, client: int, node: int, seconds: float) -> SiteReply:
        header, blob = self.inbox.pop(node, ({"lost": f"did not answer within {seconds:g} s"}, b""))
        if "lost" in header:
            return SiteReply(client, None, {}, str(header["lost"]))
        try:
            answer = read(header["header"], Answer)
            return SiteReply(client, answer, decode(blob) if blob else {}, answer.lost or problem_in(answer))
        except Exception as error:  # a site may send anything
            return SiteReply(client, None, {}, f"sent an invalid reply: {type(error).__name__}: {error}"[:300])

    def handle_next(self, seconds: float) -> None:
        """Wait up to `seconds` (at most one) for the next message of the Flower process, and handle it."""
        try:
            frame = self.link.receive(min(seconds, 1.0))
        except queue.Empty:
            return
        if frame is None:
            raise UsageError("the Flower process ended; its log is flower.log in the run's directory.")
        header, blob = frame
        match header["event"]:
            case "reply":
                if header["batch"] == self.batch:
                    self.inbox[header["node"]] = (header, blob)
            case "nodes":
                self._update_online(set(header["online"]))
            case "late":
                self.say(f"site {self._name(header['node'])} answered too late: dropped")
            case "note":
                self.say(header["text"])
            case _:
                raise UsageError(f"{header['text']}.")

    def _update_online(self, online: set[int]) -> None:
        for node in sorted(online ^ self.online):
            if self.client_of(node) is not None:
                self.say(f"site {self._name(node)} is {'online' if node in online else 'offline'}")
        self.online = online

    def _name(self, node: int) -> str:
        return next((name for name, n in self.nodes.items() if n == node), f"node {node}")

    def gather(self, hello: Request, patience: float, expected: int) -> dict[str, Answer]:
        """Greet sites as they join, until `expected` have answered or `patience` seconds are over.

        Returns the answers by site name.
        """
        answers: dict[str, Answer] = {}
        deadline = time.monotonic() + patience
        while len(answers) < expected and time.monotonic() < deadline:
            self.handle_next(0.2)
            answers |= self.greet(hello)
        return answers

    def greet(self, hello: Request) -> dict[str, Answer]:
        """Send `hello` to the nodes that joined since the last call; returns the answers by site name."""
        new = sorted(self.online - self.greeted)
        if not new:
            return {}
        self._send([(node, hello) for node in new])
        deadline = time.monotonic() + HELLO_SECONDS
        while not set(new) <= self.inbox.keys() and (left := deadline - time.monotonic()) > 0:
            self.handle_next(left)
        self.greeted |= set(new)
        return dict(filter(None, (self._admit(node, self._reply(-1, node, HELLO_SECONDS)) for node in new)))

    def _admit(self, node: int, reply: SiteReply) -> tuple[str, Answer] | None:
        """(name, answer) of a node that takes part; None if it cannot. Without keys, this sets the node's name."""
        name = reply.answer.name if self.keyless and reply.answer is not None else self._name(node)
        if reply.why or reply.answer is None:
            self.say(f"site {name} {reply.why}")
            return None
        if self.keyless:
            if self.nodes.get(name, node) in self.online - {node}:
                self.say(f"refused a second site named {name!r}: each site needs its own --name")
                return None
            self.nodes[name] = node
        return name, reply.answer
