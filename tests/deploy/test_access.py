"""Which requests of a site the server carries out: its own, for messages that are open, within their limits."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fedskew.deploy.flower.access import CHUNK, OVERHEAD, Access, Sent, declared_size, ids_of

KEY = b"key of node 1"


def tree(name: str, *children: Any) -> SimpleNamespace:
    return SimpleNamespace(object_id=name, children=list(children))


def reply(
    source: int = 1, to: str = "m1", root: str = "r", children: tuple[Any, ...] = (), signer: int = 1
) -> SimpleNamespace:
    metadata = SimpleNamespace(src_node_id=source, reply_to_message_id=to, message_id="r")
    return SimpleNamespace(
        node=SimpleNamespace(node_id=signer),
        messages_list=[SimpleNamespace(metadata=metadata)],
        message_object_trees=[tree(root, *children)],
    )


def piece(name: str, size: int = 10, signer: int = 1) -> SimpleNamespace:
    return SimpleNamespace(node=SimpleNamespace(node_id=signer), object_id=name, object_content=b"x" * size)


class Server:
    """Two open messages, m1 to node 1 and m2 to node 2, with a limit of 100 bytes."""

    def __init__(self, limit: int = 100) -> None:
        self.out = {"m1": Sent(1, 1, limit, frozenset({"m1", "a"})), "m2": Sent(1, 2, limit, frozenset({"m2", "b"}))}
        self.dropped: list[tuple[str, str]] = []
        self.resets: list[str] = []
        self.access = Access(self.out, threading.RLock(), self.give_up, self.reset, lambda: 100.0)

    def give_up(self, message: str, sent: Sent, why: str) -> None:
        self.dropped.append((message, why))
        del self.out[message]

    def reset(self, message: str, sent: Sent) -> None:
        self.resets.append(message)
        sent.reply_id, sent.expected = "", {}

    def ask(self, name: str, request: Any, node: int | None = 1) -> tuple[int, str]:
        """(status, reason); (0, "") if Flower may handle the request."""
        return self.access.check_request(name, request, KEY, node) or (0, "")


def test_a_request_counts_only_for_the_node_that_signed_it() -> None:
    server = Server()
    for name in ("pull-messages", "push-object", "pull-object", "confirm-message-received", "push-messages"):
        assert server.ask(name, piece("a", signer=2)) == (403, "source: the request is for another node")
        assert server.ask(name, piece("a"), node=None)[0] == 403
    assert server.ask("deactivate-node", SimpleNamespace(node_id=2))[0] == 403
    assert server.ask("deactivate-node", SimpleNamespace(node_id=1))[0] == 0
    other = SimpleNamespace(public_key=b"another", heartbeat_interval=10.0)
    assert server.ask("activate-node", other) == (403, "source: the request is for another key")


def test_a_node_reads_only_its_own_messages() -> None:
    server = Server()
    assert server.ask("pull-object", piece("a")) == (0, "")
    assert server.ask("pull-object", piece("b"))[0] == 410
    assert server.ask("pull-object", piece("r"))[0] == 410


def test_a_node_confirms_only_its_own_messages() -> None:
    """Flower deletes what is confirmed, so a foreign or an unknown one is answered without asking Flower."""
    server = Server()
    for message, status in (("m1", 0), ("m2", 200), ("gone", 200)):
        request = SimpleNamespace(node=SimpleNamespace(node_id=1), message_object_id=message)
        assert server.ask("confirm-message-received", request)[0] == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (reply(), 0),
        (reply(source=2), 403),
        (reply(source=2, to="m2"), 403),
        (reply(to="m2"), 410),
        (reply(to="never sent"), 410),
        (reply(root="another"), 413),
        (reply(children=tuple(tree(f"c{i}") for i in range(50))), 413),
        (reply(children=(tree("c"), tree("c"))), 413),
    ],
)
def test_a_reply_is_taken_only_from_the_node_that_was_asked(given: Any, status: int) -> None:
    assert Server().ask("push-messages", given)[0] == status


def test_a_reply_that_nests_deeply_or_widely_is_given_up_at_once() -> None:
    deep = tree("r")
    for level in range(50):
        deep = tree(f"d{level}", deep)
    server = Server()
    assert server.ask("push-messages", reply(children=(deep,)))[0] == 413
    assert server.dropped[0][0] == "m1"
    wide = tree("r", *(tree(str(i)) for i in range(10_000)))
    assert len(list(ids_of(wide, 20))) == 21


def test_a_reply_may_not_be_larger_than_its_limit() -> None:
    server = Server(limit=1000)
    server.ask("push-messages", reply(children=(tree("a"), tree("b"))))
    assert server.ask("push-object", piece("a", OVERHEAD))[0] == 0
    assert server.ask("push-object", piece("a", OVERHEAD))[0] == 0  # sent again: counted once
    assert server.ask("push-object", piece("stray"))[0] == 410
    assert server.ask("push-object", piece("b", 1001)) == (413, "size: a reply may have at most 1000 bytes")
    assert server.dropped == [("m1", "sent more than the limit of 1000 bytes")]


def test_another_sites_reply_cannot_be_completed() -> None:
    server = Server()
    server.ask("push-messages", reply(children=(tree("a"),)))
    assert server.ask("push-object", piece("a", signer=2), node=2)[0] == 410


def test_the_reply_of_a_restarted_site_replaces_the_one_it_began() -> None:
    server = Server()
    server.ask("push-messages", reply(children=(tree("a"),)))
    assert server.ask("push-messages", reply(children=(tree("a"),)))[0] == 0
    assert server.resets == []
    again = reply(root="r2", children=(tree("b"),))
    again.messages_list[0].metadata.message_id = "r2"
    assert server.ask("push-messages", again)[0] == 0
    assert server.resets == ["m1"]
    assert set(server.out["m1"].expected) == {"r2", "b"}


def test_a_late_reply_is_refused_before_it_is_sent_and_reported() -> None:
    server = Server()
    server.out["m1"].late = True
    assert server.ask("push-messages", reply())[0] == 410
    assert server.dropped == [("m1", "")]


def test_few_large_replies_are_received_at_the_same_time() -> None:
    """Four chunks make a reply large; three sites may send one, the fourth waits until one of them is done."""
    limit = 10 * CHUNK
    server = Server(limit)
    server.out |= {f"m{n}": Sent(1, n, limit) for n in (3, 4)}
    for node in (1, 2, 3, 4):
        given = reply(source=node, to=f"m{node}", signer=node, children=tuple(tree(f"{node}{i}") for i in range(4)))
        assert server.ask("push-messages", given, node)[0] == (503 if node == 4 else 0)
    del server.out["m1"]
    assert server.ask("push-messages", given, 4)[0] == 0


def test_a_heartbeat_cannot_promise_to_stay_for_half_an_hour() -> None:
    for interval, status in ((10.0, 0), (1800.0, 403), (float("nan"), 403)):
        request = SimpleNamespace(node=SimpleNamespace(node_id=1), heartbeat_interval=interval)
        assert Server().ask("send-node-heartbeat", request)[0] == status


def array(chunks: list[str], order: list[Any]) -> bytes:
    return f"Array {','.join(chunks)} 1".encode() + b"\0" + json.dumps({"arraychunk_ids": order}).encode()


def test_a_chunk_that_is_named_many_times_counts_each_time() -> None:
    chunk = b"ArrayChunk  10\0" + b"x" * 10
    assert declared_size({"c": chunk, "a": array(["c"], [0])}) == len(chunk)
    assert declared_size({"c": chunk, "a": array(["c"], [0] * 1500)}) == 1500 * len(chunk)


@pytest.mark.parametrize(
    "pieces",
    [
        {"a": array(["missing"], [0])},
        {"c": b"ArrayChunk  0\0", "a": array(["c"], [7])},
        {"c": b"ArrayChunk  0\0", "a": array(["c"], ["0"])},
        {"a": b"Array  1\0[]"},
        {"a": b"Array  1\0not json"},
        {"a": b"Array \xff 1\0{}"},
        {"a": b"Surprise  1\0"},
        {"a": b"no divider"},
        {"a": b"Array  1\0" + b"[" * 100_000},
    ],
)
def test_pieces_that_are_not_ours_are_refused_before_they_are_put_together(pieces: dict[str, bytes]) -> None:
    with pytest.raises(ValueError):
        declared_size(pieces)
