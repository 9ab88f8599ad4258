"""What a site's node may do: only its own messages, and replies to them that are no larger than expected.

Flower checks that a request names the node that signed it. It does not check whose message a reply belongs to, and
gives every object to, and deletes it for, whoever knows its id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

FLEET = "/v1/fleet/"
REQUESTS = {  # path -> Flower's type of the request; all others are refused
    "register-node": ("fleet_pb2", "RegisterNodeFleetRequest"),
    "activate-node": ("fleet_pb2", "ActivateNodeRequest"),
    "deactivate-node": ("fleet_pb2", "DeactivateNodeRequest"),
    "send-node-heartbeat": ("heartbeat_pb2", "SendNodeHeartbeatRequest"),
    "pull-messages": ("fleet_pb2", "PullMessagesRequest"),
    "pull-object": ("message_pb2", "PullObjectRequest"),
    "push-messages": ("fleet_pb2", "PushMessagesRequest"),
    "push-object": ("message_pb2", "PushObjectRequest"),
    "confirm-message-received": ("message_pb2", "ConfirmMessageReceivedRequest"),
}
CHUNK = 5 << 20  # bytes of Flower's chunks
OVERHEAD = 1 << 20  # bytes of a reply beside its tensors: header, names, Flower's own fields
DEEPEST = 6  # of the tree of a reply: message, records, record, array, chunk
LONGEST_HEARTBEAT = 30.0  # seconds; a site that promises less often would count as online for longer
UPLOADS = 3  # sites that may send a large reply at the same time; the others wait, so that memory stays bounded
LARGE = 3 * CHUNK  # bytes
Answer = tuple[int, str] | None  # HTTP status and reason; 200: nothing to do; None: Flower may handle it


@dataclass
class Sent:
    """A message that was sent and has no complete reply yet."""

    batch: int  # the batch of requests it belongs to
    node: int
    limit: int = 1 << 62  # largest reply in bytes
    pieces: frozenset[str] = frozenset()  # ids of the message's objects
    late: bool = False  # whether the server no longer waits for the reply
    reply: Any = None  # the reply; its pieces may still be missing
    reply_id: str = ""  # of the reply that is being pushed
    expected: dict[str, int] = field(default_factory=dict)  # its objects -> bytes received, 0 if not yet
    touched: float = 0.0  # when something of the reply came last


class Access:
    """Checks requests against the messages that are open. `out` maps Flower's message ids to them.

    `give_up(message, sent, why)` drops a message; `reset(message, sent)` forgets a reply that another one replaces;
    `now` is the clock.
    """

    def __init__(
        self,
        out: dict[str, Sent],
        lock: threading.RLock,
        give_up: Callable[[str, Sent, str], Any],
        reset: Callable[[str, Sent], None],
        now: Callable[[], float],
    ) -> None:
        self.out, self.lock, self.give_up, self.reset, self.now = out, lock, give_up, reset, now

    def check(self, name: str, request: Any, key: bytes, node: int | None) -> Answer:
        """(HTTP status, reason) of a request that is refused, (200, "") if nothing is to be done, else None."""
        with self.lock:
            return self.check_request(name, request, key, node)

    def check_request(self, name: str, request: Any, key: bytes, node: int | None) -> Answer:
        """As `check`, with the lock held."""
        if name in ("register-node", "activate-node"):
            if request.public_key != key:
                return 403, "source: the request is for another key"
        else:
            source = request.node.node_id if hasattr(request, "node") else request.node_id
            if node is None or source != node:
                return 403, "source: the request is for another node"
        if name in ("activate-node", "send-node-heartbeat") and not request.heartbeat_interval <= LONGEST_HEARTBEAT:
            return 403, f"heartbeat: at most {LONGEST_HEARTBEAT:g} s are allowed"
        if name == "pull-object":
            known = any(s.node == node and request.object_id in s.pieces for s in self.out.values())
            return None if known else (410, "withdrawn: this object is not part of an open message to this node")
        if name == "confirm-message-received":
            sent = self.out.get(request.message_object_id)
            return None if sent is not None and sent.node == node else (200, "")
        if name == "push-messages":
            return self._check_reply(request, node)
        return self._check_piece(request, node) if name == "push-object" else None

    def _check_reply(self, request: Any, node: int | None) -> Answer:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return 400, "expected one message"
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if metadata.src_node_id != node:
            return 403, "source: the reply is of another node"
        message = metadata.reply_to_message_id
        sent = self.out.get(message)
        if sent is not None and sent.node == node and sent.late:
            self.give_up(message, sent, "")
        if sent is None or sent.node != node or sent.late:
            return 410, "late: the server does not wait for this reply"
        ids = list(ids_of(tree, sent.limit // CHUNK + 10))
        if len(ids) > sent.limit // CHUNK + 9 or len(set(ids)) != len(ids) or tree.object_id != metadata.message_id:
            self.give_up(
                message, sent, f"sent more pieces than the limit of {sent.limit} bytes allows, or a malformed reply"
            )
            return 413, f"size: a reply may have at most {sent.limit} bytes"
        others = [s for s in self.out.values() if s is not sent and s.touched > self.now() - 60 and s.expected]
        if len(ids) * CHUNK > LARGE and sum(len(s.expected) * CHUNK > LARGE for s in others) >= UPLOADS:
            return 503, "busy: other sites are sending their replies"
        if sent.reply_id not in ("", metadata.message_id):
            self.reset(message, sent)
        if sent.reply_id != metadata.message_id:
            sent.reply_id, sent.expected = metadata.message_id, dict.fromkeys(ids, 0)
        sent.touched = self.now()
        return None

    def _check_piece(self, request: Any, node: int | None) -> Answer:
        size = len(request.object_content)
        for message, sent in self.out.items():
            if sent.node == node and request.object_id in sent.expected:
                sent.expected[request.object_id], sent.touched = size, self.now()
                if sum(sent.expected.values()) <= sent.limit + OVERHEAD:
                    return None
                self.give_up(message, sent, f"sent more than the limit of {sent.limit} bytes")
                return 413, f"size: a reply may have at most {sent.limit} bytes"
        return 410, "late: this object is not part of a reply that the server waits for"


def parsed(name: str, body: bytes) -> Any:
    """The request in a body, in Flower's type for this path; None if it cannot be read."""
    module, kind = REQUESTS[name]
    request = getattr(import_module(f"flwr.proto.{module}"), kind)()
    try:
        request.ParseFromString(body)
    except Exception:  # protobuf's DecodeError
        return None
    return request


def ids_of(tree: Any, most: int) -> Iterator[str]:
    """The object ids in a tree, at most `most` + 1; a tree that is too deep gives that many empty ids."""
    left, count = [(tree, 1)], 0
    while left and count <= most:
        node, depth = left.pop()
        if depth > DEEPEST:
            yield from [""] * (most + 1)
            return
        count += 1
        yield node.object_id
        left += [(child, depth + 1) for child in node.children[: most + 1]]


def declared_size(pieces: dict[str, bytes]) -> int:
    """The bytes that the arrays in a reply will have once they are put together: a chunk may be named many times.

    ValueError if a piece is not one that our messages have.
    """
    import json

    total = 0
    for content in pieces.values():
        head, divider, body = content.partition(b"\0")
        kind, _, rest = head.partition(b" ")
        if not divider or kind not in (
            b"Message",
            b"RecordDict",
            b"ConfigRecord",
            b"ArrayRecord",
            b"Array",
            b"ArrayChunk",
        ):
            raise ValueError("it has an unknown kind of record")
        if kind == b"Array":
            try:
                chunks = rest.partition(b" ")[0].decode().split(",")
                sizes = [len(pieces[name]) for name in chunks if name]
                total += sum(sizes[place] for place in json.loads(body)["arraychunk_ids"])
            except (KeyError, TypeError, IndexError, RecursionError, UnicodeDecodeError) as error:
                raise ValueError(f"it has a malformed array ({type(error).__name__})") from None
    return total
