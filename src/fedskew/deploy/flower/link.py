"""The server's side: Flower's SuperLink in this process, and the messages of our run.

Messages are put into the SuperLink's state and replies taken from it directly; gate.py says who gets in.
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

LINGER = 0.5  # seconds before the end, so that sites get the answers to their last requests
TICK = 0.05  # seconds between looks at what has arrived
GRACE = 30.0  # seconds a site may be gone in a round before it is left out of it


@dataclass
class Sent:
    """A message that is out."""

    ask: int
    node: int
    late: bool = False
    reply: Any = None  # came, but perhaps not all its pieces


class Link:
    def __init__(self, config: Header, pipe: Pipe) -> None:
        self.pipe, self.limit, self.secure = pipe, int(config["limit"]), bool(config["secure"])
        self.lock = threading.RLock()
        self.out: dict[str, Sent] = {}  # message -> what is known of it
        self.taken: dict[bytes, int] = {}  # public key -> bytes pushed since the last message to it
        self.online: set[int] = set()
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
            public = public_key_to_bytes(bytes_to_public_key(key.encode()))  # as the site will write it
            node: int = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0, name=name)
        except ValueError as error:
            raise ValueError(f"the public key of site {name} cannot be used: {error}") from None
        return node

    # what the fedskew process asks for

    def send(self, header: Header, blob: bytes) -> None:
        """One message to each of the named nodes: the same bytes, each its own header."""
        from flwr.app import Message

        for node, own in zip(header["to"], header["headers"], strict=True):
            with self.lock:
                info = self.state.get_node_info(node_ids=[node])
                self.taken.pop(info[0].public_key if info else b"", None)
                message = Message(as_records(own, blob), node, "train")
                message.metadata.__dict__["_message_id"] = message.object_id
                if self._store(message):
                    self.out[message.metadata.message_id] = Sent(header["ask"], node)
                else:
                    self._lost(Sent(header["ask"], node), "has not joined yet")

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

    def forget(self, ask: int) -> None:
        """What still comes in reply is late."""
        with self.lock:
            for sent in self.out.values():
                sent.late |= sent.ask == ask

    # what comes in

    def look(self) -> None:
        """One look at who is there and what has arrived."""
        with self.lock:
            infos = {info.node_id: info for info in self.state.get_node_info()}
            online = {node for node, info in infos.items() if info.status == "online"}
            if online != self.online:
                self.online = online
                self.pipe.tell({"event": "nodes", "online": sorted(online)})
            for message, sent in list(self.out.items()):
                if self._settled(message, sent, infos[sent.node]):
                    del self.out[message]

    def _settled(self, message: str, sent: Sent, info: Any) -> bool:
        if sent.reply is None:
            stored = self.state.message_ins_store.get(message)
            if stored is None:
                return self._dropped(message, sent, "could not be asked: the message is gone")
            if message not in self.state.message_ins_id_to_message_res_id:
                if info.status != "online":
                    gone = time.time() - (info.online_until or 0)
                    return gone > GRACE and self._dropped(message, sent, "is not online")
                if stored.metadata.delivered_at and stored.metadata.delivered_at < info.last_activated_at:
                    stored.metadata.delivered_at = ""  # it came back without what it was given: give it again
                return False
            found = self.state.get_message_res({message}, self.run)
            if not found:
                return False
            sent.reply = found[0]
            if sent.reply.has_error():
                return self._dropped(message, sent, f"failed: {sent.reply.error.reason}")
        return self._received(message, sent)

    def _received(self, message: str, sent: Sent) -> bool:
        """All pieces there? Then they are put together, if they are not too many."""
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
            return self._dropped(message, sent, f"sent something that is no reply: {type(error).__name__}: {error}")
        if len(blob) > self.limit:
            return self._dropped(message, sent, f"sent {len(blob)} bytes, the limit is {self.limit}")
        self._clear(message, sent)
        if sent.late:
            self.pipe.tell({"event": "late", "node": sent.node})
        else:
            self.pipe.tell({"event": "reply", "ask": sent.ask, "node": sent.node, "header": header}, blob)
        return True

    def _dropped(self, message: str, sent: Sent, why: str) -> bool:
        self._clear(message, sent)
        self._lost(sent, why)
        return True

    def _lost(self, sent: Sent, why: str) -> None:
        if not sent.late:
            self.pipe.tell({"event": "reply", "ask": sent.ask, "node": sent.node, "lost": why})

    def _clear(self, message: str, sent: Sent) -> None:
        self.state.delete_messages({message})
        self.state.object_store.delete(message)
        if sent.reply is not None:
            self.state.object_store.delete(sent.reply.metadata.message_id)

    def pushed(self, key: bytes, node: int, size: int) -> bool:
        """Count what a node sends in; False once it is more than a reply may have, and its messages are dropped."""
        with self.lock:
            self.taken[key] = self.taken.get(key, 0) + size
            if self.taken[key] <= self.limit + REQUEST:
                return True
            for message, sent in [(m, s) for m, s in self.out.items() if s.node == node]:
                self._dropped(message, sent, f"sent more than the limit of {self.limit} bytes")
                del self.out[message]
            return False


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind((host, port))
    door.listen(128)
    return door


def main() -> None:
    pipe = Pipe()
    first = pipe.hear()
    if first is None:
        return
    config = first[0]
    try:
        door = listen(config["host"], config["port"])
    except OSError as error:
        pipe.tell({"event": "failed", "text": f"cannot listen on {config['host']}:{config['port']}: {error.strerror}"})
        return
    import uvicorn

    try:
        link = Link(config, pipe)
    except ValueError as error:
        pipe.tell({"event": "failed", "text": str(error)})
        return
    options = {"ssl_certfile": config["certificate"], "ssl_keyfile": config["key"]} if link.secure else {}
    server = uvicorn.Server(
        uvicorn.Config(link.app, access_log=False, log_level="warning", timeout_graceful_shutdown=1, **options)
    )
    threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True).start()
    while not server.started:
        time.sleep(TICK)
    pipe.tell({"event": "ready", "port": door.getsockname()[1], "nodes": link.nodes})
    threading.Thread(target=watch, args=(link,), daemon=True).start()
    while (frame := pipe.hear()) is not None:
        header, blob = frame
        if header["do"] == "send":
            link.send(header, blob)
        else:
            link.forget(header["ask"])
    time.sleep(LINGER)
    os._exit(0)  # nothing here needs saving, and requests that hang would delay us


def watch(link: Link) -> None:
    beat = time.monotonic()
    while True:
        link.look()
        if time.monotonic() - beat > 10:  # else Flower takes the run for dead
            link.state.acknowledge_task_heartbeat(link.task)
            beat = time.monotonic()
        time.sleep(TICK)
