"""The signature of a request from a site: over its time, its path and its body, with a number used once."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

PROTOCOL = b"2"  # version of the messages between server and sites; both must have the same


def what_is_signed(timestamp: bytes, nonce: bytes, path: str, body: bytes) -> bytes:
    """The text that a site signs for a request."""
    return b"\n".join((b"fedskew", timestamp, nonce, path.encode(), hashlib.sha256(body).hexdigest().encode()))


def signed(key: bytes, path: str, body: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether the request was signed with the private key of this public key."""
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        signature = base64.b64decode(headers[b"fedskew-signature"], validate=True)
        text = what_is_signed(headers[b"flwr-timestamp"], headers[b"fedskew-nonce"], path, body)
        return bool(verify_signature(bytes_to_public_key(key), text, signature))
    except Exception:  # a stranger's key may be of any kind, or none
        return False


class Signing:
    """Signs the path and the body of each request, with a number used once. Flower's signature covers only the time."""

    def __init__(self, private: Any) -> None:
        self.private = private

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Add the signature to a request that Flower's interceptor has signed."""
        from flwr.supercore.primitives.asymmetric import sign_message

        request, nonce = context.request, secrets.token_hex(16)
        text = what_is_signed(
            request.headers["flwr-timestamp"].encode(), nonce.encode(), request.url.path, request.content
        )
        request.headers["fedskew-nonce"] = nonce
        request.headers["fedskew-signature"] = base64.b64encode(sign_message(self.private, text)).decode()
        request.headers["fedskew-protocol"] = PROTOCOL.decode()
        return call_next(context)
