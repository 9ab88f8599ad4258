"""Checks every request to the server before Flower handles it.

Flower's SuperLink serves three APIs on one port; only a part of the Fleet API is open here. The Control API (start
runs, register nodes) has no authentication in the open-source build, and the Runtime API is for ServerApps in other
processes. Neither is needed, because link.py accesses the SuperLink's state directly.

Flower's signature covers only the time. A site also signs the path and the body with a number used once (see
signing.py), so that a request can be neither changed nor repeated by somebody who saw it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from .access import FLEET, REQUESTS, Access, parsed
from .signing import PROTOCOL, signed

REQUEST = 8 << 20  # largest request in bytes; Flower's chunks have 5 MB
NOTES = 1000  # refusals that are reported; a port scan must not fill the log
BEHIND, AHEAD = 300, 5  # seconds that a site's clock may differ from the server's (as in Flower)
SLOWEST = 20_000  # bytes per second: a slower request is cut off
WAIT = 15.0  # seconds that a request for messages waits for one
NONCES = 50_000  # remembered per key; a site sends a few per second
Refusal = tuple[int, str] | None  # HTTP status and reason
DIRECT = {  # requests that Flower's handlers get directly, and whether they need its store of objects
    "send-node-heartbeat": False,
    "pull-messages": True,
    "pull-object": False,
    "push-messages": False,
    "push-object": False,
    "confirm-message-received": True,
}


class Passed(NamedTuple):
    """A request that may pass."""

    name: str  # the last part of its path
    request: Any  # parsed
    body: bytes


class Guarded(Protocol):
    """The part of `Link` that the gate uses."""

    state: Any  # Flower's LinkState, which has the registered nodes
    pipe: Any
    secure: bool  # whether only registered keys may connect
    access: Access

    async def wait_for_message(self, node: int, seconds: float) -> None:
        """Wait until there is a message for this node, at most `seconds`."""
        ...


class Gate:
    """ASGI middleware that lets requests pass if they are not too large, signed by a known key, and new.

    The timestamp of a request must agree with the server's clock. Other requests are refused with the reason.
    """

    def __init__(self, app: Any, link: Guarded) -> None:
        self.app, self.link = app, link
        self.noted: set[str] = set()
        self.seen: dict[bytes, OrderedDict[bytes, float]] = {}  # key -> nonces and when they came

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse, Response

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            answer = await self._pass(scope, receive)
            if isinstance(answer, Passed):
                content = await self._handle(answer)
                if content is None:
                    await self.app(scope, replayed(answer.body, receive), send)
                    return
                await Response(content, media_type="application/x-protobuf")(scope, receive, send)
            elif answer[0] == 200:  # nothing to do: an empty protobuf message
                await Response(b"", media_type="application/x-protobuf")(scope, receive, send)
            else:
                await JSONResponse({"refused": answer[1]}, answer[0])(scope, receive, send)

    async def _handle(self, passed: Passed) -> bytes | None:
        """What Flower's handler answers, called directly; None if Flower's application must handle the request.

        The application would parse the request and check its signature again, in ten layers; this takes a third of its
        time. It handles what is rare, and turns errors into responses.
        """
        from flwr.superlink.servicer.fleet import fleet_handlers
        from starlette.concurrency import run_in_threadpool

        if passed.name not in DIRECT:
            return None
        more = {"store": self.link.state.object_store} if DIRECT[passed.name] else {}
        handler = getattr(fleet_handlers, passed.name.replace("-", "_"))
        try:
            answer = await run_in_threadpool(handler, request=passed.request, state=self.link.state, **more)
            return bytes(answer.SerializeToString())
        except Exception:
            return None

    async def _pass(self, scope: Any, receive: Any) -> Passed | tuple[int, str]:
        """A request that may pass, or (HTTP status, reason)."""
        path, headers = scope["path"], dict(scope["headers"])
        peer = (scope.get("client") or ["?"])[0]
        refused = self.refusal(path, headers, peer)
        if refused is not None:
            return refused
        length = int(headers[b"content-length"])
        try:
            body = await asyncio.wait_for(read_body(receive, length), 10 + length / SLOWEST)
        except TimeoutError:
            return 408, "the request did not arrive in time"
        if body is None:
            return 400, "the request has another length than it says"
        key = base64.b64decode(headers[b"flwr-public-key"])
        if not signed(key, path, body, headers):
            return 401, "not signed"
        if not self._is_new(key, headers[b"fedskew-nonce"]):
            self._note(f"refused {peer}: it repeated a request")
            return 403, "repeated: this request came before"
        name = path.removeprefix(FLEET)
        node = self.link.state.get_node_id_by_public_key(key)
        request = parsed(name, body)
        if request is None:
            return 400, "the request cannot be read"
        answer = self.link.access.check(name, request, key, node)
        if answer is None and name == "pull-messages" and not await self._wait(node, receive):
            return 408, "the site has gone"
        return Passed(name, request, body) if answer is None else answer

    async def _wait(self, node: int, receive: Any) -> bool:
        """Wait for a message to a node; False if the site closed the connection: it must not take the message then."""
        message = asyncio.ensure_future(self.link.wait_for_message(node, WAIT))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((message, gone), return_when=asyncio.FIRST_COMPLETED)
        left = gone.done()
        for task in (message, gone):
            task.cancel()
        return not left

    def refusal(self, path: str, headers: dict[bytes, bytes], peer: str) -> Refusal:
        """(HTTP status, reason) if a request is refused before its body is read; None if it may go on."""
        if path.removeprefix(FLEET) not in REQUESTS or not path.startswith(FLEET):
            return 404, "only the Fleet API is available"
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 9 or int(length) > REQUEST:
            return 413, f"a request may have at most {REQUEST} bytes"
        try:
            key = base64.b64decode(headers[b"flwr-public-key"], validate=True)
            age = (datetime.now(UTC) - datetime.fromisoformat(headers[b"flwr-timestamp"].decode())).total_seconds()
        except (KeyError, ValueError, TypeError):
            return 401, "not signed"
        if (version := headers.get(b"fedskew-protocol", b"1")) != PROTOCOL:
            theirs = version.decode("ascii", "replace")[:10]
            self._note(f"refused {peer}: it speaks version {theirs!a} of the protocol, this server {PROTOCOL.decode()}")
            return 403, f"version: it speaks {PROTOCOL.decode()}, not {theirs!a}; install the same fedskew on both"
        if not -AHEAD < age < BEHIND:
            self._note(f"refused {peer}: its clock is {abs(age):.0f} s {'behind' if age > 0 else 'ahead'}")
            return 403, f"clock: it is {abs(age):.0f} s {'behind' if age > 0 else 'ahead of'} the server's"
        node = self.link.state.get_node_id_by_public_key(key)
        if node is None and (self.link.secure or not path.endswith(("/register-node", "/activate-node"))):
            fingerprint = hashlib.sha256(key).hexdigest()[:16]
            self._note(f"refused {peer}: its key ({fingerprint}...) is not the key of a registered site")
            return 403, f"key: the server does not know this key ({fingerprint}...)"
        return None

    def _is_new(self, key: bytes, nonce: bytes) -> bool:
        """Whether this nonce did not come before from this key. Older ones are forgotten: their time has passed."""
        now = asyncio.get_running_loop().time()
        seen = self.seen.setdefault(key, OrderedDict())
        while seen and next(iter(seen.values())) < now - BEHIND - AHEAD - 60:
            seen.popitem(last=False)
        if nonce in seen or len(seen) >= NONCES or len(nonce) > 64:
            return False
        seen[nonce] = now
        return True

    def _note(self, text: str) -> None:
        if text not in self.noted and len(self.noted) < NOTES:
            self.noted.add(text)
            self.link.pipe.send({"event": "note", "text": text})


async def read_body(receive: Any, length: int) -> bytes | None:
    """The body of a request; None if it is not `length` bytes long."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] != "http.request":
            return None
        body += event.get("body", b"")
        if len(body) > length:
            return None
        if not event.get("more_body", False):
            return bytes(body) if len(body) == length else None


def replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body that was read already, then what else comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again
