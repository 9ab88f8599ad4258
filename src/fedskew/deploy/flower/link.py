"""The server: Flower's SuperLink in this process, and the messages of a run.

Messages are written to the SuperLink's state, and replies read from it, directly. gate.py checks every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from .access import Access, Sent, declared_size
from .bell import Bell
from .connections import allow_many_connections, impatient_protocol, listen
from .frames import Header, Pipe, as_records, body_record, from_records
from .keys import inspect
from .superlink import make_app, register, start_run, unregister

LINGER = 0.5  # seconds before the process ends, in which sites get the responses to their last requests
TICK = 0.05  # seconds between polls of the SuperLink's state
STOPPED = 5.0  # seconds between two polls after which this process was suspended, and its sites need time again
KEYS = 2.0  # seconds between looks for keys that were revoked


class Link:
    """Flower's SuperLink with one run, and the messages of that run.

    `config` is that of `Hosting.config`; `pipe` leads to the fedskew process.
    """

    def __init__(self, config: Header, pipe: Pipe) -> None:
        self.pipe, self.limit, self.secure = pipe, int(config["limit"]), bool(config["secure"])
        self.lock = threading.RLock()
        self.out: dict[str, Sent] = {}  # Flower's message id -> message
        self.online: set[int] = set()  # nodes
        self.polled = self.woke = time.time()  # when `poll` ran last; when this process was last suspended
        self.grace = float(config["grace"])  # seconds a site may be offline before it is left out of a round
        self.bell = Bell()
        self.keys = {name: Path(config["keys"]) / f"{name}.pub" for name in config["sites"]}
        self.access = Access(self.out, self.lock, self._give_up, self._reset, time.monotonic)
        self.app = make_app(self)
        self.state = self.app.state.linkstate_factory.state()
        self.run, self.task = start_run(self.state)
        self.nodes = {name: register(self.state, name, key) for name, key in sorted(config["sites"].items())}

    # commands of the fedskew process

    def send(self, header: Header, blob: bytes) -> None:
        """Send a message to each node of header["to"]: its own header of header["headers"], and the same bytes."""
        from flwr.app import Message

        body = body_record(blob)
        limit = min(self.limit, int(header.get("limit", self.limit)))
        for node, message_header in zip(header["to"], header["headers"], strict=True):
            with self.lock:
                message = Message(as_records(message_header, body), node, "train")
                message.metadata.__dict__["_message_id"] = message.object_id
                sent = Sent(header["batch"], node, limit)
                if self._store(message, sent):
                    self.out[message.metadata.message_id] = sent
                else:
                    self._report_lost(sent, "has not joined yet")
        self.bell.ring()

    def _store(self, message: Any, sent: Sent) -> bool:
        from flwr.app.message import remove_content_from_message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        session = self.state.start_session(self.run)
        objects = get_all_nested_objects(message)
        sent.pieces = frozenset(objects)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(message), get_object_tree(message), session
        )
        for name in missing:
            self.state.store_object(self.run, session, name, objects[name].deflate())
        return bool(stored)

    def forget(self, batch: int) -> None:
        """Stop waiting for the replies to a batch: messages that no site took are withdrawn, other replies are late."""
        with self.lock:
            for message, sent in [(m, s) for m, s in self.out.items() if s.batch == batch]:
                sent.late = True
                stored = self.state.message_ins_store.get(message)
                if stored is None or not stored.metadata.delivered_at:
                    self._delete(message, sent)
                    del self.out[message]

    def revoke(self) -> None:
        """Forget the keys whose files are gone: the requests of these sites are refused from now on."""
        for name in [name for name, path in self.keys.items() if not path.exists()]:
            del self.keys[name]
            node = self.nodes[name]
            with self.lock:
                unregister(self.state, node)
            self.pipe.send({"event": "note", "text": f"warning: the key of site {name} was revoked"})
            with self.lock:
                for message, sent in [(m, s) for m, s in self.out.items() if s.node == node]:
                    self._give_up(message, sent, "had its key revoked")

    # replies of the sites

    def poll(self) -> None:
        """Report changes of the nodes that are online, and the replies that have arrived."""
        with self.lock:
            if time.time() - self.polled > STOPPED:
                self.woke = time.time()
            self.polled = time.time()
            infos = {info.node_id: info for info in self.state.get_node_info()}
            online = {node for node, info in infos.items() if info.status == "online"}
            if online != self.online:
                self.online = online
                self.pipe.send({"event": "nodes", "online": sorted(online)})
            for message, sent in list(self.out.items()):
                if message in self.out and self._is_done(message, sent, infos[sent.node]):
                    self.out.pop(message, None)

    def _is_done(self, message: str, sent: Sent, info: Any) -> bool:
        """Whether a message has its complete reply, or was given up; reports either. `info` is that of its node."""
        if sent.reply is None:
            stored = self.state.message_ins_store.get(message)
            if stored is None:
                return self._drop(message, sent, "could not be asked: the message has expired")
            if message not in self.state.message_ins_id_to_message_res_id:
                if info.status != "online":
                    offline = time.time() - max(info.online_until or 0, self.woke)
                    return offline > self.grace and self._drop(message, sent, "is not online")
                if stored.metadata.delivered_at and stored.metadata.delivered_at < info.last_activated_at:
                    stored.metadata.delivered_at = ""  # the site was restarted after it got the message: send it again
                    self.bell.ring()
                return False
            replies = self.state.get_message_res({message}, self.run)
            if not replies:
                return False
            sent.reply = replies[0]
            if sent.reply.has_error():
                return self._drop(message, sent, f"failed: {sent.reply.error.reason}")
        return self._read_reply(message, sent)

    def _read_reply(self, message: str, sent: Sent) -> bool:
        """Put the pieces of a reply together and pass it on; False if pieces are missing."""
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        pieces = {name: self.state.get_object(self.run, name) for name in sent.expected}
        if any(piece is None for piece in pieces.values()):  # Flower forgets a reply that stops for three minutes
            self._reset(message, sent)
        if not all(pieces.values()):
            return False
        try:
            if (size := declared_size(pieces)) > sent.limit:
                return self._drop(message, sent, f"declares {size} bytes, the limit is {sent.limit}")
            header, blob = from_records(inflate_object_from_contents(sent.reply_id, pieces).content)
        except Exception as error:  # a site may send anything
            return self._drop(message, sent, f"sent an invalid reply: {type(error).__name__}: {str(error)[:200]}")
        self._delete(message, sent)
        if sent.late:
            self.pipe.send({"event": "late", "node": sent.node})
        else:
            self.pipe.send({"event": "reply", "batch": sent.batch, "node": sent.node, "header": header}, blob)
        return True

    def _drop(self, message: str, sent: Sent, why: str) -> bool:
        """Give a message up; always True."""
        self._delete(message, sent)
        self._report_lost(sent, why)
        return True

    def _report_lost(self, sent: Sent, why: str) -> None:
        if not sent.late:
            self.pipe.send({"event": "reply", "batch": sent.batch, "node": sent.node, "lost": why})

    def _delete(self, message: str, sent: Sent) -> None:
        self.state.delete_messages({message})
        self.state.object_store.delete(message)
        if sent.reply is not None:
            self.state.object_store.delete(sent.reply.metadata.message_id)

    def _give_up(self, message: str, sent: Sent, why: str) -> None:
        self._drop(message, sent, why)
        if sent.late:
            self.pipe.send({"event": "late", "node": sent.node})
        self.out.pop(message, None)

    def _reset(self, message: str, sent: Sent) -> None:
        """Forget an incomplete reply: the site was restarted and sends another one."""
        self.state.object_store.delete(sent.reply_id)
        self.state.message_res_store.pop(sent.reply_id, None)
        self.state.message_ins_id_to_message_res_id.pop(message, None)
        sent.reply, sent.reply_id, sent.expected = None, "", {}

    # waiting sites

    async def wait_for_message(self, node: int, seconds: float) -> None:
        """Wait until there is a message that this node has not got, at most `seconds`."""
        self._send_again(node)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._has_message(node) and (left := deadline - loop.time()) > 0:
            await self.bell.wait(left)

    def _send_again(self, node: int) -> None:
        """A site that asks for messages works on none: what it got before without replying was lost on the way."""
        with self.lock:
            for message, sent in [(m, s) for m, s in self.out.items() if s.node == node]:
                stored = self.state.message_ins_store.get(message)
                if stored is None or message in self.state.message_ins_id_to_message_res_id:
                    continue
                if sent.late and stored.metadata.delivered_at:
                    self._give_up(message, sent, "")
                stored.metadata.delivered_at = ""

    def _has_message(self, node: int) -> bool:
        stored = self.state.message_ins_store
        return any(
            sent.node == node and (found := stored.get(message)) is not None and not found.metadata.delivered_at
            for message, sent in list(self.out.items())
        )


def main() -> None:
    """Receive the config, serve sites, and carry out the commands of the fedskew process until it ends."""
    pipe = Pipe()
    first = pipe.receive()
    if first is None:
        return
    config = first[0]
    allow_many_connections()
    try:
        listener = listen(config["host"], config["port"])
    except OSError as error:
        pipe.send({"event": "failed", "text": f"cannot listen on {config['host']}:{config['port']}: {error.strerror}"})
        return
    import uvicorn

    try:
        link = Link(config, pipe)
    except ValueError as error:
        pipe.send({"event": "failed", "text": str(error)})
        return
    options = {"ssl_certfile": config["certificate"], "ssl_keyfile": config["key"]} if link.secure else {}
    server = uvicorn.Server(
        uvicorn.Config(
            link.app,
            http=impatient_protocol(),
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=20,
            timeout_graceful_shutdown=1,
            **options,
        )
    )
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    while not server.started:
        time.sleep(TICK)
    valid = {}
    if link.secure:
        for path in (Path(config["certificate"]), Path(config["certificate"]).with_name("ca.crt")):
            with contextlib.suppress(ValueError):
                valid[path.name] = inspect(path.read_bytes())["until"]
    pipe.send({"event": "ready", "port": listener.getsockname()[1], "nodes": link.nodes, "certificates": valid})
    threading.Thread(target=watch, args=(link,), daemon=True).start()
    while (frame := pipe.receive()) is not None:
        header, blob = frame
        if header["do"] == "send":
            link.send(header, blob)
        else:
            link.forget(header["batch"])
    time.sleep(LINGER)
    os._exit(0)  # there is nothing to save, and open requests would delay a regular exit


def watch(link: Link) -> None:
    """Poll for replies and for revoked keys, forever."""
    looked = time.monotonic()
    while True:
        link.poll()
        if time.monotonic() - looked > KEYS:
            link.revoke()
            looked = time.monotonic()
        time.sleep(TICK)
