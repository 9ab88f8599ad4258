"""A site's side: speaks Flower's Fleet API as a SuperNode does, hands each message to the fedskew process
that started it, and carries its reply back.

Unlike Flower's own SuperNode it fetches no code from the server, needs no port of its own, starts no
process per message, and does not give up when the server is away or still counts a crashed site as present.
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

from .frames import Header, Pipe, as_records, from_records

HEARTBEAT = 10.0  # seconds, the least that Flower allows; after two without one a site is away
POLL, SLOWEST = 0.1, 1.0  # seconds between looks for a message: at first, and after a quiet minute
LONGEST = 10.0  # seconds between attempts to reach a server that is away

T = TypeVar("T")


class Refused(Exception):
    """Trying again would not help."""


class TooLarge(Exception):
    """The server does not take a reply of this size."""


class Away(Exception):
    """The server cannot be reached just now."""


class Unknown(Exception):
    """The server does not know this node (any more): join anew."""


class Carrier:
    def __init__(self, config: Header, pipe: Pipe) -> None:
        self.pipe, self.config = pipe, config
        self.client = self._client()
        self.node: Any = None
        self.said = ""
        self.answers: queue.SimpleQueue[tuple[Header, bytes]] = queue.SimpleQueue()

    def _client(self) -> Any:
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
            [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signing],
        )

    def ask(self, call: Callable[[Any], T], request: Any) -> T:
        """The server's answer; while it is away, again and again."""
        pause = 0.5
        while True:
            try:
                answer = self.attempt(call, request)
                self.said = ""
                return answer
            except Away as away:
                self.say(f"{away}; trying again")
                time.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(LONGEST, pause * 1.5)

    def attempt(self, call: Callable[[Any], T], request: Any) -> T:
        """One request; what goes wrong is either worth another attempt or not."""
        import httpx

        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            raise self._verdict(error.response) from None
        except httpx.TransportError as error:
            text = str(error)
            if "CERTIFICATE_VERIFY_FAILED" in text:
                reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text
                raise Refused(f"the server's certificate is not accepted: {reason}") from None
            if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
                raise Refused("the server does not speak TLS; it was started with --insecure") from None
            plain = self.config["insecure"] and "disconnected" in text
            hint = "; if it speaks TLS, join without --insecure" if plain else ""
            raise Away(f"cannot reach {self.config['server']} ({text}){hint}") from None

    def _verdict(self, response: Any) -> Exception:
        try:
            why = response.json().get("refused", "")
        except (ValueError, AttributeError):
            why = ""
        if self.node is not None and (response.status_code in (401, 412) or why.startswith("key")):
            return Unknown("the server was restarted")  # it registers its sites anew
        if why.startswith("size"):
            return TooLarge(why)
        if why:
            return Refused(f"the server refuses this site: {why}")
        if response.status_code == 412:
            return Away("the server still counts this site as present and will notice in a moment")
        if response.status_code == 401:
            return Refused("the server refuses this site: its signature is not valid")
        return Away(f"the server answered {response.status_code} ({response.text[:200]})")

    # joining

    def join(self) -> None:
        """Be one of the server's nodes; as often as it takes."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node

        self.node = None
        if not self.config["key"]:
            self.ask(self._register, RegisterNodeFleetRequest(public_key=self.public))
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        self.node = Node(node_id=self.ask(self.client.ActivateNode, request).node_id)
        self.pipe.tell({"event": "joined"})

    def _register(self, request: Any) -> None:
        import httpx

        try:
            self.client.RegisterNode(request)
        except httpx.HTTPStatusError as error:
            if "already in use" not in error.response.text:
                raise

    def say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            self.pipe.tell({"event": "trouble", "text": text})

    def beat(self) -> None:
        """The heartbeat's thread. What fails here fails in the main loop too, which deals with it."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while True:
            time.sleep(HEARTBEAT / 3)
            if (node := self.node) is not None:
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                with contextlib.suppress(Away, Unknown, Refused):
                    self.attempt(self.client.SendNodeHeartbeat, request)

    def leave(self) -> None:
        """The process that started us is gone: say so to the server, and end."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        if self.node is not None:
            with contextlib.suppress(Exception):  # else it will notice
                self.client._client.timeout = 2.0
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        os._exit(0)

    # carrying

    def serve(self) -> None:
        """Fetch messages, one at a time, until the pipe ends."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        quiet = time.monotonic()
        while True:
            try:
                if self.node is None:
                    self.join()
                response = self.ask(self.client.PullMessages, PullMessagesRequest(node=self.node))
                if response.messages_list:
                    self.carry(response.messages_list[0], response.message_object_trees[0])
                    quiet = time.monotonic()
                else:
                    time.sleep(min(SLOWEST, max(POLL, (time.monotonic() - quiet) / 60)))
            except Unknown as unknown:
                self.say(f"{unknown}; joining anew")
                self.node = None

    def carry(self, proto: Any, tree: Any) -> None:
        """One message in, one reply out. It is confirmed only then, so that after a crash it comes again."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        message = message_from_proto(proto)
        header, blob = from_records(self.fetch(message, tree))
        self.pipe.tell({"event": "ask", "header": header}, blob)
        began = time.monotonic()
        header, blob = self.answers.get()
        try:
            self.deliver(message, header, blob, seconds=time.monotonic() - began)
        except TooLarge as size:
            self.say(f"a reply of {len(blob)} bytes was not taken: {size}")
        self.pipe.tell({"event": "delivered"})
        run, name = message.metadata.run_id, message.metadata.message_id
        request = ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=name)
        self.ask(self.client.ConfirmMessageReceived, request)

    def fetch(self, message: Any, tree: Any) -> Any:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import (
            ObjectPullError,
            inflate_object_from_contents,
            pull_objects,
        )

        names = [piece.object_id for piece in iterate_object_tree(tree)]
        pull = make_pull_object_fn_protobuf(
            lambda request: self.ask(self.client.PullObject, request), self.node, message.metadata.run_id
        )
        try:
            pieces = pull_objects(names, pull, max_time=600)
        except ObjectPullError as error:
            raise Unknown(f"a message was withdrawn ({error})") from None
        return inflate_object_from_contents(message.metadata.message_id, pieces).content

    def deliver(self, message: Any, header: Header, blob: bytes, *, seconds: float) -> None:
        """The reply, in pieces; a piece is sent until it has arrived."""
        from flwr.app import Message
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects

        reply = Message(as_records(header, blob), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        response = self.ask(self.client.PushMessages, request)
        push = make_push_object_fn_protobuf(
            lambda request: self.ask(self.client.PushObject, request),
            self.node,
            message.metadata.run_id,
            response.session_id,
        )
        try:
            push_objects(objects, push, object_ids_to_push=set(response.objects_to_push), keep_objects=True)
        except ObjectPushError as error:
            self.say(f"a reply was not taken: {error}")


def main() -> None:
    pipe = Pipe()
    first = pipe.hear()
    if first is None:
        return
    carrier = Carrier(first[0], pipe)

    def listen() -> None:
        while (frame := pipe.hear()) is not None:
            carrier.answers.put(frame)
        carrier.leave()

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=carrier.beat, daemon=True).start()
    try:
        carrier.serve()
    except Refused as refused:
        pipe.tell({"event": "refused", "text": str(refused)})
