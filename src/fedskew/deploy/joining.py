"""`fedskew join`: connects one site with a server; requests arrive through Flower."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock

from fedskew.core.settings import UsageError
from fedskew.core.text import clean
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import SOURCES, load
from fedskew.deploy.certs import expiry_warning
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.messages import Answer, as_header
from fedskew.deploy.node import Node
from fedskew.federation.store import Blob

LAST_REPLY_SECONDS = 10.0  # time to wait until the server has the last reply of a run


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and the keys to connect with."""

    server: str  # HOST:PORT
    ca: str = ""  # the authority's certificate, PEM text; "" if insecure
    key: str = ""  # the site's private key, PEM text; "" creates one for this session (insecure only)
    insecure: bool = False  # without TLS

    def config(self) -> Header:
        """The first message to deploy/flower/carrier.py."""
        return {"server": self.server, "ca": self.ca, "key": self.key, "insecure": self.insecure}


def server_address(server: str, certs: Path | None, insecure: bool) -> ServerAddress:
    """The address `server` (HOST:PORT) with the keys in the folder `certs`, which is None if `insecure`."""
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--server {server} is invalid: expected HOST:PORT, as in fl.example.org:8470.")
    if insecure:
        if certs is not None:
            raise UsageError("--insecure and --certs exclude each other: give one of them.")
        return ServerAddress(server, insecure=True)
    if certs is None:
        raise UsageError("give this site's folder of keys with --certs (see `fedskew certs`), or use --insecure.")
    try:
        return ServerAddress(server, (certs / "ca.crt").read_text(), (certs / "site.key").read_text())
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {error.strerror}; --certs expects the folder of a site."
        ) from None


def lock_states(folder: Path) -> filelock.BaseFileLock:
    """Create and lock the folder of a site's states, for this user and process only. Release the lock at the end."""
    os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except OSError as error:
        if isinstance(error, filelock.Timeout):
            raise UsageError(
                f"{folder} is in use by another `fedskew join`; each site needs its own --state."
            ) from None
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from None
    return lock


def load_own_data(text: str, data_dir: Path | None) -> DataSet | None:
    """The data of a path, so that an error in them raises UsageError before the site joins; None for a named set."""
    return None if text in SOURCES or not text else load(text, data_dir)


def _record(node: Node, server: str, kind: str, answer: Answer, payload: Blob) -> None:
    """Write a reply to the site's record; UsageError if that fails: what is not recorded does not leave."""
    try:
        node.audit.record(server, kind, answer, payload)
    except OSError as error:
        raise UsageError(
            f"{node.audit.path} cannot be written: {error.strerror}; a reply that is not recorded is not sent."
        ) from None


def join(node: Node, address: ServerAddress, *, stay: bool, say: Callable[[str], None]) -> None:
    """Answer the requests of a server until the run is over; with `stay`, until Ctrl-C.

    `say` prints a line for the operator.
    """
    log = node.states.folder / "flower.log"
    process = FlowerProcess("carrier", address.config(), log)
    over = False
    try:
        while True:
            try:
                frame = process.receive(LAST_REPLY_SECONDS if over else None)
            except queue.Empty:  # the server ended before it confirmed the last reply
                frame = {"event": "delivered"}, b""
            if frame is None:
                raise UsageError(f"the Flower process ended; see {log}.")
            header, blob = frame
            assert isinstance(blob, bytes)  # no spool
            match header["event"]:
                case "request":
                    answer, payload = node.reply(header["header"], blob)
                    while node.notes:
                        say(node.notes.pop(0))
                    kind = str(header["header"].get("kind"))[:20]
                    _record(node, address.server, kind, answer, payload)
                    process.send(as_header(answer), payload)
                    over = kind == "done" and not stay
                case "delivered":
                    if over:
                        say("the run is over")
                        return
                case "joined":
                    say(f"ready: joined {address.server}")
                    if header.get("until") and (warning := expiry_warning("ca.crt", header["until"])):
                        say(warning)
                case "trouble":
                    say(clean(header["text"]))
                case _:
                    raise UsageError(f"{clean(header['text'])}.")
    finally:
        process.close()
