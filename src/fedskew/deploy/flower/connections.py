"""The server's socket, and connections that do not wait for ever: idle ones and those that send drop by drop end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

IDLE = 20.0  # seconds without a complete head of a request
LOOK = 2.0  # seconds between looks


def impatient_protocol() -> Any:
    """Uvicorn's HTTP protocol, which closes a connection that is not working on a request for `IDLE` seconds.

    Uvicorn's own keep-alive time counts from a response to the next byte, so not before the first request, and not
    between the bytes of one.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.idle_since = time.monotonic()
            self._look()

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self.idle_since = time.monotonic()
            elif time.monotonic() - self.idle_since > IDLE:
                self.transport.abort()
                return
            asyncio.get_running_loop().call_later(LOOK, self._look)

    return Impatient


def allow_many_connections() -> None:
    """Let this process open as many files as the system allows it, not the 1024 that it usually begins with.

    Before TLS is agreed on, anyone may hold a connection, for a minute: that many must not shut the sites out.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports a limit that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an IPv4 or IPv6 address; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener
