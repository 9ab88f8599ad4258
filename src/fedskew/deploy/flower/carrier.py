"""The connection of a site to the server: passes messages from the server to the fedskew process, and replies back.

It uses Flower's Fleet API as a SuperNode does. Unlike Flower's SuperNode it downloads no code from the server, needs
no port, starts no process per message, and retries when the server cannot be reached or still regards a crashed site
as online.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .access import declared_size, ids_of
from .frames import Header, Pipe, as_records, body_record, from_records
from .keys import inspect
from .signing import Signing
from .verdicts import Away, Busy, Refused, TooLarge, Unknown, Withdrawn, broken, verdict

HEARTBEAT = 10.0  # seconds, the minimum in Flower; a site that misses two heartbeats is offline
QUICKEST = 0.5  # seconds between requests for messages: the server answers them when there is one, or after 15 s
LARGEST = 8 << 30  # bytes of a message from the server
MOST_PIECES = 2000  # objects of a message
LONGEST_PAUSE = 10.0  # seconds between attempts to reach the server
PUSH_ATTEMPTS = 5  # to push the pieces of a reply

T = TypeVar("T")


class Carrier:
    """A node of the server. `config` is that of `ServerAddress.config`; `pipe` leads to the fedskew process."""

    def __init__(self, config: Header, pipe: Pipe) -> None:
        self.pipe, self.config = pipe, config
        self.client = self._make_client()
        self.node: Any = None  # Flower's Node; None while not joined
        self.joined = False  # whether it was ever joined
        self.last_note = ""
        self.answers: queue.SimpleQueue[tuple[Header, bytes]] = queue.SimpleQueue()

    def _make_client(self) -> Any:
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import bytes_to_private_key, generate_key_pairs, public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        insecure, text = self.config["insecure"], self.config["key"]
        private = bytes_to_private_key(text.encode()) if text else generate_key_pairs()[0]
        self.public = public_key_to_bytes(private.public_key())
        signing = NodeAuthHttpInterceptor(private, private.public_key())
        return FleetHttpClient.from_server_address(
            self.config["server"],
            insecure,
            None if insecure else self.config["ca"].encode(),
            [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signing, Signing(private)],
        )

    def call_with_retry(self, call: Callable[[Any], T], request: Any) -> T:
        """Send a request and return the response; retries while the server cannot be reached."""
        pause = 0.5
        while True:
            try:
                answer = self.attempt(call, request)
                self.last_note = ""
                return answer
            except Away as away:
                if not isinstance(away, Busy):
                    self.note(f"{away}; retrying")
                time.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(LONGEST_PAUSE, pause * 1.5)

    def attempt(self, call: Callable[[Any], T], request: Any) -> T:
        """Send a request once. Raises Away if a retry may help, and the other exceptions of this module if not."""
        import httpx

        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            raise verdict(error.response, self.node is not None, self.joined) from None
        except httpx.TransportError as error:
            text = str(error)
            plain = self.config["insecure"] and "disconnected" in text
            hint = "; if it uses TLS, join without --insecure" if plain else ""
            raise broken(text, self.joined, f"cannot reach {self.config['server']} ({text}){hint}") from None

    # joining

    def join(self) -> None:
        """Become one of the server's nodes."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node

        self.node = None
        if not self.config["key"]:
            self.call_with_retry(self._register, RegisterNodeFleetRequest(public_key=self.public))
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        self.node = Node(node_id=self.call_with_retry(self.client.ActivateNode, request).node_id)
        self.joined = True
        until = "" if self.config["insecure"] else inspect(self.config["ca"].encode())["until"]
        self.pipe.send({"event": "joined", "until": until})

    def _register(self, request: Any) -> None:
        import httpx

        try:
            self.client.RegisterNode(request)
        except httpx.HTTPStatusError as error:
            if "already in use" not in error.response.text:
                raise

    def note(self, text: str) -> None:
        """Report a problem to the operator, unless it was the last one reported."""
        if text != self.last_note:
            self.last_note = text
            self.pipe.send({"event": "trouble", "text": text})

    def send_heartbeats(self) -> None:
        """Send heartbeats forever, in a thread. Errors are ignored: they occur in `serve` too, which handles them."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while True:
            time.sleep(HEARTBEAT / 3)
            if (node := self.node) is not None:
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                with contextlib.suppress(Away, Unknown, Refused):
                    self.attempt(self.client.SendNodeHeartbeat, request)

    def leave(self) -> None:
        """Sign off from the server and end this process: the fedskew process has ended."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        if self.node is not None:
            with contextlib.suppress(Exception):  # without it, the server misses our heartbeats
                self.client._client.timeout = 2.0
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        os._exit(0)

    # messages

    def serve(self) -> None:
        """Handle messages, one at a time, forever; `leave` ends the process."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        while True:
            try:
                if self.node is None:
                    self.join()
                asked = time.monotonic()
                response = self.call_with_retry(self.client.PullMessages, PullMessagesRequest(node=self.node))
                if response.messages_list:
                    self.handle(response.messages_list[0], response.message_object_trees[0])
                else:
                    time.sleep(max(0.0, asked + QUICKEST - time.monotonic()))
            except Withdrawn as withdrawn:
                self.note(f"a message or its reply was dropped ({withdrawn})")
            except Unknown as unknown:
                self.note(f"{unknown}; joining again")
                self.node = None

    def handle(self, proto: Any, tree: Any) -> None:
        """Pass a message to the fedskew process and send its reply.

        The message is confirmed after the reply, so that the server sends it again if this site crashes.
        """
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        message = message_from_proto(proto)
        began = time.monotonic()
        try:
            header, blob = from_records(self.fetch(message, tree))
        except (Withdrawn, Unknown, Refused):
            raise
        except Exception as error:  # a server may send anything
            self.note(f"the server sent a message that cannot be read ({type(error).__name__}: {str(error)[:200]})")
            header, blob = {"lost": f"cannot read the message ({type(error).__name__})"}, b""
        else:
            self.pipe.send({"event": "request", "header": header}, blob)
            header, blob = self.answers.get()
        try:
            self.deliver(message, header, blob, seconds=time.monotonic() - began)
        except TooLarge as size:
            self.note(f"a reply of {len(blob)} bytes was not accepted: {size}")
        self.pipe.send({"event": "delivered"})
        run, name = message.metadata.run_id, message.metadata.message_id
        request = ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=name)
        self.call_with_retry(self.client.ConfirmMessageReceived, request)

    def fetch(self, message: Any, tree: Any) -> Any:
        """Download the content of a message, which Flower stores in pieces. Its size is checked before it is built."""
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.supercore.inflatable.inflatable_object import get_object_id
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        run, names = message.metadata.run_id, list(ids_of(tree, MOST_PIECES))
        if len(names) > MOST_PIECES:
            raise ValueError(f"it has more than {MOST_PIECES} pieces")
        pieces: dict[str, bytes] = {}
        for name in names:
            request = PullObjectRequest(node=self.node, run_id=run, object_id=name)
            piece = self.call_with_retry(self.client.PullObject, request).object_content
            if get_object_id(piece) != name:
                raise ValueError("a piece is not the one that was announced")
            pieces[name] = piece
            if sum(map(len, pieces.values())) > LARGEST:
                raise ValueError(f"it has more than {LARGEST} bytes")
        if declared_size(pieces) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        return inflate_object_from_contents(message.metadata.message_id, pieces).content

    def deliver(self, message: Any, header: Header, blob: bytes, *, seconds: float) -> None:
        """Send the reply to a message, in pieces. `seconds` is how long it took, for Flower's statistics."""
        from flwr.app import Message
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects

        reply = Message(as_records(header, body_record(blob)), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        for attempt in range(PUSH_ATTEMPTS):
            response = self.call_with_retry(self.client.PushMessages, request)  # also says which pieces are missing
            push = make_push_object_fn_protobuf(
                lambda request: self.call_with_retry(self.client.PushObject, request),
                self.node,
                message.metadata.run_id,
                response.session_id,
            )
            try:
                push_objects(objects, push, object_ids_to_push=set(response.objects_to_push), keep_objects=True)
                return
            except ObjectPushError as error:  # also if a piece arrived, but the response to it was lost
                if attempt == PUSH_ATTEMPTS - 1:
                    self.note(f"a reply was not accepted: {error}")


def main() -> None:
    """Receive the config, then connect the fedskew process with the server until either refuses or ends."""
    pipe = Pipe()
    first = pipe.receive()
    if first is None:
        return
    carrier = Carrier(first[0], pipe)

    def listen() -> None:
        while (frame := pipe.receive()) is not None:
            carrier.answers.put(frame)
        carrier.leave()

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=carrier.send_heartbeats, daemon=True).start()
    try:
        carrier.serve()
    except Refused as refused:
        pipe.send({"event": "refused", "text": str(refused)})
