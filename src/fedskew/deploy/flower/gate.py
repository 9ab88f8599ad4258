"""Checks every request to the server before Flower handles it.

Flower's SuperLink serves three APIs on one port; only the Fleet API is open here. The Control API (start runs,
register nodes) has no authentication in the open-source build, and the Runtime API is for ServerApps in other
processes. Neither is needed, because link.py accesses the SuperLink's state directly.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from typing import Any, Protocol

REQUEST = 8 << 20  # largest request in bytes; Flower's chunks have 5 MB
NOTES = 1000  # refusals that are reported; a port scan must not fill the log
BEHIND, AHEAD = 300, 5  # seconds that a site's clock may differ from the server's (as in Flower)


class Guarded(Protocol):
    """The part of `Link` that the gate uses."""

    state: Any  # Flower's LinkState, which has the registered nodes
    pipe: Any
    secure: bool  # whether only registered keys may connect
    limit: int  # largest reply in bytes

    def pushed(self, key: bytes, node: int, size: int) -> bool:
        """Count `size` bytes sent by a node; False if that is more than a reply may have."""
        ...


class Gate:
    """ASGI middleware that lets requests to the Fleet API pass if they are not too large and come from a known key.

    The timestamp of a request must agree with the server's clock. Other requests are refused with the reason.
    """

    def __init__(self, app: Any, link: Guarded) -> None:
        self.app, self.link = app, link
        self.noted: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        if scope["type"] == "http":
            peer = (scope.get("client") or ["?"])[0]
            refused = self.refusal(scope["path"], dict(scope["headers"]), peer)
            if refused is not None:
                await JSONResponse({"refused": refused[1]}, refused[0])(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return
        await self.app(scope, receive, send)

    def refusal(self, path: str, headers: dict[bytes, bytes], peer: str) -> tuple[int, str] | None:
        """(HTTP status, reason) if a request is refused; None if it may pass."""
        if not path.startswith("/v1/fleet/"):
            return 404, "only the Fleet API is available"
        if not headers.get(b"content-length", b"").isdigit() or int(headers[b"content-length"]) > REQUEST:
            return 413, f"a request may have at most {REQUEST} bytes"
        try:
            key = base64.b64decode(headers[b"flwr-public-key"], validate=True)
            age = (datetime.now(UTC) - datetime.fromisoformat(headers[b"flwr-timestamp"].decode())).total_seconds()
        except (KeyError, ValueError, TypeError):
            return 401, "not signed"
        if not -AHEAD < age < BEHIND:
            self._note(f"refused {peer}: its clock is {abs(age):.0f} s {'behind' if age > 0 else 'ahead'}")
            return 403, f"clock: it is {abs(age):.0f} s {'behind' if age > 0 else 'ahead of'} the server's"
        node = self.link.state.get_node_id_by_public_key(key)
        if node is None and (self.link.secure or not path.endswith(("/register-node", "/activate-node"))):
            fingerprint = hashlib.sha256(key).hexdigest()[:16]
            self._note(f"refused {peer}: its key ({fingerprint}...) is not the key of a registered site")
            return 403, f"key: the server does not know this key ({fingerprint}...)"
        if path.endswith(("/push-object", "/push-messages")):
            if not signed(key, headers):  # otherwise anyone could use up the limit of a site
                return 401, "not signed"
            if not self.link.pushed(key, node, int(headers[b"content-length"])):
                return 413, f"size: a reply may have at most {self.link.limit} bytes"
        return None

    def _note(self, text: str) -> None:
        if text not in self.noted and len(self.noted) < NOTES:
            self.noted.add(text)
            self.link.pipe.send({"event": "note", "text": text})


def signed(key: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether the signature in a request's headers is valid for this public key."""
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
    except (KeyError, ValueError):
        return False
    return bool(verify_signature(bytes_to_public_key(key), headers[b"flwr-timestamp"], signature))
