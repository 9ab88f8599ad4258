"""The border of the server: what stands before everything Flower serves.

Of Flower's three APIs on the SuperLink's port only the Fleet API is open to the network. The Control API
(start runs, register nodes) has no authentication in the open build, and the Runtime API is for
ServerApps in processes of their own; we need neither, because we hold the SuperLink's state ourselves.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from typing import Any, Protocol

REQUEST = 8 << 20  # bytes of one request: Flower's chunks are of 5 MB
NOTES = 1000  # refusals that are told; a scan of the port need not fill the log
BEHIND, AHEAD = 300, 5  # seconds by which a site's clock may differ (Flower's own bounds)


class Guarded(Protocol):
    """What the gate needs of the link behind it."""

    state: Any  # Flower's link state: who is registered
    pipe: Any
    secure: bool
    limit: int  # bytes of a reply

    def pushed(self, key: bytes, node: int, size: int) -> bool: ...


class Gate:
    """Lets in signed requests of known keys with a right clock, up to a size; tells the others why not."""

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
        """(status, why) for a request that is not let in."""
        if not path.startswith("/v1/fleet/"):
            return 404, "only the Fleet API is open here"
        if not headers.get(b"content-length", b"").isdigit() or int(headers[b"content-length"]) > REQUEST:
            return 413, f"a request may have {REQUEST} bytes"
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
            mark = hashlib.sha256(key).hexdigest()[:16]
            self._note(f"refused {peer}: its key ({mark}...) is not one of the registered sites'")
            return 403, f"key: the server does not know this key ({mark}...)"
        if path.endswith(("/push-object", "/push-messages")):
            if not signed(key, headers):  # else anybody could use up a site's allowance
                return 401, "not signed"
            if not self.link.pushed(key, node, int(headers[b"content-length"])):
                return 413, f"size: a reply may have {self.link.limit} bytes"
        return None

    def _note(self, text: str) -> None:
        if text not in self.noted and len(self.noted) < NOTES:
            self.noted.add(text)
            self.link.pipe.tell({"event": "note", "text": text})


def signed(key: bytes, headers: dict[bytes, bytes]) -> bool:
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
    except (KeyError, ValueError):
        return False
    return bool(verify_signature(bytes_to_public_key(key), headers[b"flwr-timestamp"], signature))
