"""The sites as the server sees them: their names and nodes, who is online, and the exchange of messages with them."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.core.text import clean
from fedskew.deploy.flower.frames import Frame, Header
from fedskew.deploy.messages import Answer, Request, as_header, problem_in, read
from fedskew.federation.wire import decode_from_peer

PULSE = 5.0  # seconds after which `Roster.on_change` is called without a change, so that `seen` is told
RETRY = 30.0  # seconds until a site whose first answer was unusable is greeted again
LONGEST_STEP = 3.0  # seconds that one wait counts; more passes only if this process was suspended
SITE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class Channel(Protocol):
    """The connection to the process with Flower's server (deploy/flower/link.py); tests replace it."""

    def send(self, header: Header, blob: Any = b"") -> None:
        """Send one message to the process."""
        ...

    def receive(self, seconds: float | None = None) -> Frame | None:
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


class Timer:
    """Counts down the seconds in which this process runs: a suspended server gives its sites their time back."""

    def __init__(self, seconds: float) -> None:
        self.left, self.seen = seconds, time.monotonic()

    def remaining(self) -> float:
        """The seconds left; at most `LONGEST_STEP` are counted since the last call."""
        now = time.monotonic()
        self.left -= min(now - self.seen, LONGEST_STEP)
        self.seen = now
        return self.left


class Roster:
    """The sites of a run. A site's client number is the position of its name in `names`.

    `nodes` maps names to Flower's node numbers, as far as they are known. `say` prints a line for the operator. With
    `keyless` any node may join and gives its own name; otherwise a node is identified by its key. `hello` is the first
    request to a site, which it gets whenever it comes online; None: it gets none.
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
        self.on_change: Callable[[], None] = lambda: None  # called when a site comes, goes, agrees or is refused
        self.hello: Request | None = None
        self.greetings: set[int] = set()  # batches of greetings
        self.greeted: dict[int, float] = {}  # node -> when to greet it again; infinity while it is to answer
        self.answers: dict[str, Answer] = {}  # of sites that take part, to `hello`, by name
        self.refusals: list[str] = []  # what was refused, the last ones
        self.seen: dict[int, float] = {}  # node -> when it was last known to be online, in seconds since 1970
        self.pulsed = 0.0  # when `on_change` was last called without a change
        self.last_batch = self.batch = 0  # number of the last batch of requests, and of the current one of a round
        self.inbox: dict[int, Frame] = {}  # node -> its reply to the current batch

    def client_of(self, node: int) -> int | None:
        """The client number of a node; None if it is not one of the run's sites."""
        name = next((name for name, n in self.nodes.items() if n == node), None)
        return self.names.index(name) if name in self.names else None

    def present(self) -> list[int]:
        """The client numbers of the sites that are online, in order."""
        return [c for c, name in enumerate(self.names) if self.nodes.get(name) in self.online]

    def collect(self, requests: Mapping[int, Request], blob: Any, seconds: float, limit: int | None = None) -> Replies:
        """Send a request to each client (client -> request), with the same bytes, and wait for their replies.

        At most `seconds`. `limit` is the largest reply in bytes; None: that of `Hosting`. Large replies are on disk.
        """
        nodes = {client: self.nodes[self.names[client]] for client in requests if self.names[client] in self.nodes}
        self.inbox = {}
        self.batch = self._send([(node, requests[client]) for client, node in nodes.items()], blob, limit)
        timer = Timer(seconds)
        try:
            while not set(nodes.values()) <= self.inbox.keys() and (left := timer.remaining()) > 0:
                self.handle_next(left)
        finally:
            self.link.send({"do": "forget", "batch": self.batch})
        frames = {client: self.inbox.pop(node) for client, node in nodes.items() if node in self.inbox}
        return Replies(dict(requests), frames, frozenset(nodes), seconds)

    def _send(self, requests: list[tuple[int, Request]], blob: Any = b"", limit: int | None = None) -> int:
        """Send a batch of requests, as (node, request), with the same bytes; returns its number."""
        self.last_batch += 1
        nodes, headers = [node for node, _ in requests], [as_header(request) for _, request in requests]
        command: Header = {"do": "send", "batch": self.last_batch, "to": nodes, "headers": headers}
        self.link.send(command | ({} if limit is None else {"limit": limit}), blob)
        return self.last_batch

    def handle_next(self, seconds: float) -> None:
        """Wait up to `seconds` (at most one) for the next message of the Flower process, and handle it."""
        self._greet()
        if time.monotonic() - self.pulsed >= PULSE:
            self.pulsed = time.monotonic()
            self.seen |= dict.fromkeys(self.online, time.time())
            self.on_change()
        try:
            frame = self.link.receive(min(seconds, 1.0))
        except queue.Empty:
            return
        if frame is None:
            raise UsageError("the Flower process ended; its log is flower.log in the run's directory.")
        header, data = frame
        match header["event"]:
            case "reply":
                if header["batch"] in self.greetings:
                    self._admit(header["node"], frame)
                elif header["batch"] == self.batch:
                    self.inbox[header["node"]] = frame
                elif isinstance(data, Path):
                    data.unlink(missing_ok=True)
            case "nodes":
                self._update_online(set(header["online"]))
            case "late":
                self.refuse(f"site {self._name(header['node'])} answered too late: dropped")
            case "note":
                self.refuse(clean(header["text"]))
            case _:
                raise UsageError(f"{clean(header['text'])}.")

    def refuse(self, text: str) -> None:
        """Report something that was refused, and keep it for `fedskew status`."""
        self.refusals = [*self.refusals[-19:], f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}"]
        self.say(f"warning: {text}")
        self.on_change()

    def _update_online(self, online: set[int]) -> None:
        for node in sorted(online ^ self.online):
            if self.client_of(node) is not None:
                self.say(f"site {self._name(node)} is {'online' if node in online else 'offline'}")
        for node in online - self.online:
            self.greeted.pop(node, None)
        self.seen |= dict.fromkeys(online | self.online, time.time())
        self.online = online
        self.on_change()

    def _name(self, node: int) -> str:
        return next((name for name, n in self.nodes.items() if n == node), f"node {node}")

    def gather(self, hello: Request, patience: float, expected: int) -> dict[str, Answer]:
        """Greet sites as they join, until `expected` have answered or `patience` seconds are over.

        Returns the answers by site name. A site that needs longer, to load its data, may answer at any time later.
        """
        self.hello = hello
        timer = Timer(patience)
        while len(self.answers) < expected and timer.remaining() > 0:
            self.handle_next(0.2)
        for _ in range(2 * expected if len(self.answers) < expected else 0):
            self.handle_next(0)  # what has arrived already, if this process was too busy to read it in time
        return dict(self.answers)

    def _greet(self) -> None:
        """Send `hello` to the nodes that came online, and again to those whose answer could not be used."""
        now = time.monotonic()
        due = sorted(node for node in self.online if self.greeted.get(node, 0.0) <= now)
        if self.hello is not None and due:
            self.greeted |= dict.fromkeys(due, float("inf"))
            self.greetings.add(self.last_batch + 1)
            self._send([(node, self.hello) for node in due])

    def _admit(self, node: int, frame: Frame) -> None:
        """Note the first answer of a node, or why it cannot take part. Without keys, this sets the node's name."""
        reply = read_reply(-1, frame, None, 0)
        answer = reply.answer
        name = answer.name if self.keyless and answer is not None else self._name(node)
        why = reply.why
        if not why and not re.fullmatch(SITE_NAME, name):
            why = f"has the name {clean(name, 70)!r}: expected letters, digits, '.', '-' and '_'"
        if not why and self.keyless and self.nodes.get(name, node) in self.online - {node}:
            why = f"is refused: a second site named {name!r}; each site needs its own --name"
        if why or answer is None:
            self.greeted[node] = time.monotonic() + RETRY
            self.refuse(f"site {clean(name, 70)} {why}")
            return
        if self.keyless:
            self.nodes[name] = node
        self.answers[name] = answer
        self.on_change()


class Replies:
    """The replies of sites to a batch of requests, checked when they are read. Leave the `with` block to drop them."""

    def __init__(
        self, requests: dict[int, Request], frames: dict[int, Frame], asked: frozenset[int], seconds: float
    ) -> None:
        self.requests, self.frames, self.asked, self.seconds = requests, frames, asked, seconds

    def read(self, client: int, tensors: int, samples: int | None = None) -> SiteReply:
        """The reply of a client; without an answer if it did not come or cannot be used.

        `tensors` is how many tensors an update may have, `samples` how many the site has (None: not checked).
        """
        if client not in self.asked:
            return SiteReply(client, None, {}, "has not joined yet")
        if client not in self.frames:
            return SiteReply(client, None, {}, f"did not answer within {self.seconds:g} s")
        return read_reply(client, self.frames[client], self.requests[client], tensors, samples)

    def drop(self, client: int) -> None:
        """Delete a reply that is no longer needed."""
        frame = self.frames.pop(client, None)
        if frame is not None and isinstance(frame[1], Path):
            frame[1].unlink(missing_ok=True)

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, *error: object) -> None:
        for client in list(self.frames):
            self.drop(client)


def read_reply(
    client: int, frame: Frame, request: Request | None, tensors: int, samples: int | None = None
) -> SiteReply:
    """The reply in a frame of the Flower process, checked. With `request` it must be an answer to that one."""
    header, data = frame
    if "lost" in header:
        return SiteReply(client, None, {}, clean(header["lost"]))
    try:
        answer = read(header["header"], Answer)
        if request is not None and (answer.run, answer.round) != (request.run, request.round) and not answer.lost:
            return SiteReply(client, None, {}, f"answered round {answer.round + 1} of another request: ignored")
        why = clean(answer.lost) or problem_in(answer, samples)
        blob = b"" if why else data.read_bytes() if isinstance(data, Path) else data
        return SiteReply(client, answer, decode_from_peer(blob, tensors) if blob else {}, why)
    except Exception as error:  # a site may send anything
        return SiteReply(client, None, {}, clean(f"sent an invalid reply: {type(error).__name__}: {error}"))
