"""Runs the web server of `fedskew watch`: in the foreground, or in a thread beside a run."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError, library

SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 200
STARTING = 15.0  # seconds that the server has to start
ENDING = 5  # seconds that open pages have to end, which look once a second whether they must
LINGER = 2.5  # seconds that it stays after a run, so that open pages see the end


@dataclass(frozen=True)
class Address:
    """Where to listen, and who may look.

    host: an address of this machine; one that other machines can reach needs `token` and `certs`.
    port: 0 for any free one.
    token: what a browser must know; "": nothing, on a loopback address.
    certs: folder with server.crt and server.key, as `fedskew certs` makes it; None: no TLS.
    """

    host: str = "127.0.0.1"
    port: int = 8471
    token: str = ""
    certs: Path | None = None

    def check(self) -> None:
        """Raise `UsageError` if others could look, or listen in, without a token or without TLS."""
        from fedskew.watch.app import is_loopback

        if self.token and len(self.token) < SHORTEST_TOKEN:
            raise UsageError(f"--token is too short: expected at least {SHORTEST_TOKEN} letters.")
        if not is_loopback(self.host) and not (self.token and self.certs):
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give --token (or FEDSKEW_WATCH_TOKEN) and "
                "--certs, the server's folder of `fedskew certs`."
            )
        for name in ("server.crt", "server.key") if self.certs else ():
            assert self.certs is not None
            if not (self.certs / name).is_file():
                raise UsageError(f"{self.certs} has no {name}: expected the server's folder of `fedskew certs`.")

    def listen(self) -> socket.socket:
        """A socket that listens there."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise UsageError(f"cannot listen on {self.host}:{self.port}: {error.strerror}; try --port 0.") from None

    def url(self, port: int) -> str:
        """The address to open. A token is not part of it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certs else 'http'}://{host}:{port}/"


def web_server() -> Any:
    """The package uvicorn; UsageError if the extra `watch` is not installed."""
    library("starlette", "watch")
    return library("uvicorn", "watch")


def make_server(folder: Path, address: Address) -> tuple[Any, socket.socket, str]:
    """(uvicorn's server, the socket to serve on, the address to open)."""
    uvicorn = web_server()
    from fedskew.watch.app import make_app
    from fedskew.watch.folder import Folder

    address.check()
    made: list[Any] = []  # the server, once it is made: streams end by themselves when it stops
    app = make_app(
        Folder(folder),
        host=address.host,
        token=address.token,
        secure=address.certs is not None,
        over=lambda: any(server.should_exit for server in made),
    )
    tls: dict[str, Any] = {}
    if address.certs:
        tls = {"ssl_certfile": address.certs / "server.crt", "ssl_keyfile": address.certs / "server.key"}
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=ENDING,
        server_header=False,
        **tls,
    )
    try:
        config.load()  # reads the certificate
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificate in {address.certs} cannot be used: {error}.") from None
    listener = address.listen()
    made.append(uvicorn.Server(config))
    return made[0], listener, address.url(listener.getsockname()[1])


@contextlib.contextmanager
def watching(folder: Path, address: Address) -> Iterator[str]:
    """Serve from a thread; yields the address to open. Ends a moment after the block, for pages to see its end."""
    server, listener, url = make_server(folder, address)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    linger = LINGER
    try:
        yield url
    except KeyboardInterrupt:
        linger = 0.0
        raise
    finally:
        if thread.is_alive() and server.server_state.connections:
            time.sleep(linger)
        server.should_exit = True
        thread.join(STARTING)
        listener.close()
