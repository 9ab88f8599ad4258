"""The server: Flower's SuperLink in this process, and the messages of a run.

Messages are written to the SuperLink's state, and replies read from it, directly. gate.py checks every request.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from .frames import Header, Pipe, as_records, from_records
from .gate import REQUEST, Gate

LINGER = 0.5  # seconds before the process ends, in which sites get the responses to their last requests
TICK = 0.05  # seconds between polls of the SuperLink's state
GRACE = 30.0  # seconds a site may be offline before it is left out of a round


@dataclass
class Sent:
    """A message that was sent and has no complete reply yet."""

    batch: int  # the batch of requests it belongs to
    node: int
    late: bool = False  # whether the server no longer waits for the reply
    reply: Any = None  # the reply; its pieces may still be missing


class Link:
    """Flower's SuperLink with one run, and the messages of that run.

    `config` is that of `Hosting.config`; `pipe` leads to the fedskew process.
    """

    def __init__(self, config: Header, pipe: Pipe) -> None:
        self.pipe, self.limit, self.secure = pipe, int(config["limit"]), bool(config["secure"])
        self.lock = threading.RLock()
        self.out: dict[str, Sent] = {}  # Flower's message id -> message
        self.taken: dict[bytes, int] = {}  # public key -> bytes received since the last message to it
        self.online: set[int] = set()  # nodes
        self.app = self._make_app()
        self.state = self.app.state.linkstate_factory.state()
        self.run = self._start_run()
        self.nodes = {name: self._register(name, key) for name, key in sorted(config["sites"].items())}

    def _make_app(self) -> Any:
        from flwr.superlink.main import create_app

        app = create_app()
        app.state.enable_supernode_auth = self.secure
        app.add_middleware(Gate, link=self)
        return app

    def _start_run(self) -> int:
        from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
        from flwr.supercore.task_identity import TaskIdentity

        run: int = self.state.create_run(
            "fedskew/fedskew", "1", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.task = self.state.get_run_info(run_ids=[run])[0].primary_task_id
        self.state.claim_task(self.task)
        self.state.activate_task(self.task)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, self.task
        return run

    def _register(self, name: str, key: str) -> int:
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

        try:
            public = public_key_to_bytes(bytes_to_public_key(key.encode()))  # normalised, as sites send it
            node: int = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0, name=name)
        except ValueError as error:
            raise ValueError(f"the public key of site {name} is invalid: {error}") from None
        return node

    # commands of the fedskew process

    def send(self, header: Header, blob: bytes) -> None:
        """Send a message to each node of header["to"]: its own header of header["headers"], and the same bytes."""
        from flwr.app import Message

        for node, message_header in zip(header["to"], header["headers"], strict=True):
            with self.lock:
                info = self.state.get_node_info(node_ids=[node])
                self.taken.pop(info[0].public_key if info else b"", None)
                message = Message(as_records(message_header, blob), node, "train")
                message.metadata.__dict__["_message_id"] = message.object_id
                sent = Sent(header["batch"], node)
                if self._store(message):
                    self.out[message.metadata.message_id] = sent
                else:
                    self._report_lost(sent, "has not joined yet")

    def _store(self, message: Any) -> bool:
        from flwr.app.message import remove_content_from_message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        session = self.state.start_session(self.run)
        objects = get_all_nested_objects(message)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(message), get_object_tree(message), session
        )
        for name in missing:
            self.state.store_object(self.run, session, name, objects[name].deflate())
        return bool(stored)

    def forget(self, batch: int) -> None:
        """Stop waiting for the replies to a batch: those that still arrive are late."""
        with self.lock:
            for sent in self.out.values():
                sent.late |= sent.batch == batch

    # replies of the sites

    def poll(self) -> None:
        """Report changes of the nodes that are online, and the replies that have arrived."""
        with self.lock:
            infos = {info.node_id: info for info in self.state.get_node_info()}
            online = {node for node, info in infos.items() if info.status == "online"}
            if online != self.online:
                self.online = online
                self.pipe.send({"event": "nodes", "online": sorted(online)})
            for message, sent in list(self.out.items()):
                if self._is_done(message, sent, infos[sent.node]):
                    del self.out[message]

    def _is_done(self, message: str, sent: Sent, info: Any) -> bool:
        """Whether a message has its complete reply, or was given up; reports either. `info` is that of its node."""
        if sent.reply is None:
            stored = self.state.message_ins_store.get(message)
            if stored is None:
                return self._drop(message, sent, "could not be asked: the message has expired")
            if message not in self.state.message_ins_id_to_message_res_id:
                if info.status != "online":
                    offline = time.time() - (info.online_until or 0)
                    return offline > GRACE and self._drop(message, sent, "is not online")
                if stored.metadata.delivered_at and stored.metadata.delivered_at < info.last_activated_at:
                    stored.metadata.delivered_at = ""  # the site was restarted after it got the message: send it again
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
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        root = sent.reply.metadata.message_id
        try:
            names = [tree.object_id for tree in iterate_object_tree(self.state.object_store.get_object_tree(root))]
            pieces = {name: self.state.get_object(self.run, name) for name in names}
            if any(piece == b"" for piece in pieces.values()):
                return False
            header, blob = from_records(inflate_object_from_contents(root, pieces).content)
        except Exception as error:
            return self._drop(message, sent, f"sent an invalid reply: {type(error).__name__}: {error}")
        if len(blob) > self.limit:
            return self._drop(message, sent, f"sent {len(blob)} bytes, the limit is {self.limit}")
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

    def pushed(self, key: bytes, node: int, size: int) -> bool:
        """Count `size` bytes sent by a node; False if that is more than a reply may have, and drops its messages."""
        with self.lock:
            self.taken[key] = self.taken.get(key, 0) + size
            if self.taken[key] <= self.limit + REQUEST:
                return True
            for message, sent in [(m, s) for m, s in self.out.items() if s.node == node]:
                self._drop(message, sent, f"sent more than the limit of {self.limit} bytes")
                del self.out[message]
            return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an IPv4 or IPv6 address; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def main() -> None:
    """Receive the config, serve sites, and carry out the commands of the fedskew process until it ends."""
    pipe = Pipe()
    first = pipe.receive()
    if first is None:
        return
    config = first[0]
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
        uvicorn.Config(link.app, access_log=False, log_level="warning", timeout_graceful_shutdown=1, **options)
    )
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    while not server.started:
        time.sleep(TICK)
    pipe.send({"event": "ready", "port": listener.getsockname()[1], "nodes": link.nodes})
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
    """Poll for replies forever, and send the heartbeats that keep Flower from ending the run."""
    beat = time.monotonic()
    while True:
        link.poll()
        if time.monotonic() - beat > 10:
            link.state.acknowledge_task_heartbeat(link.task)
            beat = time.monotonic()
        time.sleep(TICK)
