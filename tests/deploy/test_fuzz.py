"""Whatever bytes come from outside, a decoder refuses them in its own way, and makes nothing larger than they are."""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedskew.core.tensors import Tensors
from fedskew.core.text import clean
from fedskew.deploy.flower import gate
from fedskew.deploy.flower.access import declared_size
from fedskew.deploy.flower.frames import from_records
from fedskew.deploy.messages import Answer, Request, as_header, read
from fedskew.deploy.node import Node
from fedskew.deploy.policy import Policy, Refusal, read_experiment
from fedskew.deploy.roster import read_reply
from fedskew.deploy.states import States
from fedskew.evaluation.sent_counts import from_text
from fedskew.federation.wire import _cached_header, decode, decode_from_peer, decode_with_notes, encode

pytestmark = pytest.mark.slow


def sample_payload() -> dict[str, Tensors]:
    return {"parameters": Tensors(w=torch.ones(3, 4), none=torch.zeros(0, 3)), "odd": Tensors(n=torch.tensor(7))}


FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
values = st.recursive(
    st.one_of(numbers, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
    max_leaves=15,
)
VALID = bytes(encode(sample_payload()))


@st.composite
def mutated(draw: st.DrawFn, valid: bytes = VALID) -> bytes:
    """A valid message in which a few bytes were changed, cut out or put in."""
    blob = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(blob) - 1)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if blob:
                blob[place] = draw(st.integers(0, 255))
            case "cut":
                del blob[place : place + draw(st.integers(1, 40))]
            case _:
                blob[place:place] = draw(st.binary(max_size=20))
    return bytes(blob)


@st.composite
def headed(draw: st.DrawFn) -> bytes:
    """A payload whose header has the right keys and any values."""
    entry = st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "I64", "BOOL"]), values),
            "shape": st.one_of(st.lists(st.integers(-3, 2**70), max_size=4), values),
            "data_offsets": st.one_of(st.lists(st.integers(-8, 64), min_size=2, max_size=2), values),
        }
    )
    about = {"layout": draw(st.one_of(st.just('{"g": ["a", "b"]}'), st.text(), values)), "notes": draw(values)}
    header = {"__metadata__": draw(st.one_of(st.just(about), values)), "g/a": draw(entry), "g/b": draw(values | entry)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + draw(st.binary(max_size=64))


def bounded(call: Callable[[], Any], most: int = 8 << 20) -> Any:
    """The result of a call; AssertionError if Python allocated more than `most` bytes for it."""
    tracemalloc.start()
    try:
        return call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


@FEW
@given(st.one_of(st.binary(max_size=300), mutated(), headed()))
def test_bytes_that_are_no_payload_are_a_value_error(blob: bytes) -> None:
    for read_bytes in (decode, decode_with_notes, lambda given: decode_from_peer(given, 10)):
        with contextlib.suppress(ValueError):
            made = bounded(lambda read_bytes=read_bytes: read_bytes(blob))
            payload = made[0] if isinstance(made, tuple) else made
            assert sum(t.numel() * t.element_size() for ts in payload.values() for t in ts.values()) <= len(blob)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"__metadata__":' + b'{"a":' * 100_000,
        b'{"__metadata__": {"layout": "{}", "notes": "' + b"[" * 100_000 + b'"}}',
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_header_of_deep_or_endless_values_is_refused(header: bytes) -> None:
    blob = len(header).to_bytes(8, "little") + header
    for read_bytes in (decode, lambda given: decode_from_peer(given, 10)):
        with pytest.raises(ValueError, match="not a payload"):
            read_bytes(blob)


def test_headers_of_peers_are_not_kept_and_have_few_tensors() -> None:
    before = _cached_header.cache_info().currsize
    for n in range(5):
        decode_from_peer(encode({"g": Tensors({f"peer{n}": sample_payload()["parameters"]["w"]})}), 10)
    assert _cached_header.cache_info().currsize == before
    many = encode({"g": Tensors({str(i): sample_payload()["parameters"]["none"] for i in range(20)})})
    with pytest.raises(ValueError, match="it has 20 tensors, expected at most 10"):
        decode_from_peer(many, 10)
    wide = encode({"g": Tensors({"n" * 30_000: sample_payload()["parameters"]["w"]})})
    with pytest.raises(ValueError, match="the header is too long"):
        decode_from_peer(wide, 10)


@FEW
@given(st.dictionaries(st.sampled_from([*as_header(Answer()), "x"]), values, max_size=6), st.binary(max_size=50))
def test_any_reply_of_a_site_is_an_answer_or_a_reason(header: dict[str, Any], blob: bytes) -> None:
    reply = bounded(lambda: read_reply(0, ({"header": header}, blob), Request("work", "00000000", "digits"), 10, 5))
    assert reply.answer is not None or reply.why
    assert clean(reply.why) == reply.why


@FEW
@given(st.dictionaries(st.sampled_from([*as_header(Request("work", "", "")), "x"]), values, max_size=8), mutated())
def test_any_request_of_a_server_is_answered(header: dict[str, Any], blob: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Node("nothing-is-loaded", States(Path(folder)), name="north")
        answer, payload = site.reply({"kind": "work", "run": "00000000", "data": "sites"} | header, blob)
    assert payload == b""
    assert answer.lost or header.get("kind") == "done"
    assert read(json.loads(json.dumps(as_header(answer))), Answer) == answer


@FEW
@given(st.dictionaries(st.sampled_from(["method", "model", "split", "training", "rounds", "x"]), values))
def test_any_settings_are_an_experiment_or_refused(given_settings: dict[str, Any]) -> None:
    with contextlib.suppress(Refusal):
        read_experiment(given_settings, Policy())


@FEW
@given(
    st.dictionaries(
        st.text(max_size=3), st.binary(max_size=80) | st.builds(lambda b: b"Array a,b 3\0" + b, st.binary())
    )
)
def test_any_pieces_have_a_size_or_are_refused(pieces: dict[str, bytes]) -> None:
    with contextlib.suppress(ValueError):
        assert bounded(lambda: declared_size(pieces)) >= 0


@FEW
@given(
    st.text(max_size=40)
    | st.binary(max_size=400).map(lambda b: base64.b64encode(zlib.compress(b)).decode())
    | st.just(base64.b64encode(zlib.compress(bytes(50_000_000))).decode())
)
def test_any_counts_are_possible_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        bounded(lambda: from_text(text, 3))


@FEW
@given(values)
def test_any_records_are_a_frame_or_refused(text: Any) -> None:
    for records in ({"header": {"json": text}}, {"header": {"json": json.dumps(text)}}, {"header": text}):
        with contextlib.suppress(ValueError):
            assert isinstance(from_records(records)[0], dict)


class Nobody:
    """A link that knows no key."""

    secure, state, pipe = True, None, None

    def __init__(self) -> None:
        self.state = self.pipe = self

    def get_node_id_by_public_key(self, key: bytes) -> None:
        return None

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        assert clean(header["text"]) == header["text"]


@FEW
@given(
    st.text(max_size=20) | st.just("/v1/fleet/pull-messages"),
    st.dictionaries(
        st.sampled_from([b"content-length", b"flwr-public-key", b"flwr-timestamp", b"fedskew-protocol", b"x"]),
        st.binary(max_size=40)
        | st.sampled_from([b"2", b"10", base64.b64encode(b"key"), datetime.now(UTC).isoformat().encode()]),
    ),
)
def test_any_head_of_a_request_of_a_stranger_is_refused(path: str, headers: dict[bytes, bytes]) -> None:
    refused = gate.Gate(None, Nobody()).refusal(path, headers, "peer")
    assert refused is not None
    assert refused[0] in (401, 403, 404, 413)


@FEW
@given(st.text())
def test_cleaned_text_is_one_printable_line(text: str) -> None:
    safe = clean(text)
    assert len(safe) <= 300
    assert len(safe.splitlines()) <= 1
    assert all(character.isprintable() or character.isspace() for character in safe)
    assert clean(safe) == safe
