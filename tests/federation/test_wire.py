import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as library_load
from safetensors.torch import save as library_save

from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.wire import (
    KINDS,
    decode,
    decode_with_notes,
    digest,
    encode,
    encode_into,
    size_in_bytes,
    size_of,
)
from toys import same


def sample() -> Payload:
    return {
        "parameters": Tensors(w=torch.randn(3, 4), b=torch.tensor(2.5), none=torch.zeros(0, 3)),
        "buffers": Tensors(),
        "odd": Tensors(flag=torch.tensor([True, False, True]), n=torch.tensor(7), half=torch.randn(3).bfloat16()),
    }


names = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="/"), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    return {
        group: Tensors(
            {
                name: torch.randint(0, 2, draw(shapes)).to(KINDS[draw(st.sampled_from(sorted(KINDS)))])
                for name in draw(st.lists(names, unique=True, max_size=4))
            }
        )
        for group in draw(st.lists(names, unique=True, max_size=3))
    }


@given(payloads())
def test_any_payload_comes_back_exactly_in_its_order(payload: Payload) -> None:
    back = decode(encode(payload))
    assert same(payload, back)
    assert list(back) == list(payload)
    assert all(list(back[g]) == list(payload[g]) for g in payload)
    assert all(back[g][n].dtype == t.dtype for g in payload for n, t in payload[g].items())


def test_the_bytes_are_what_the_safetensors_library_reads() -> None:
    payload = sample()
    read = library_load(bytes(encode(payload)))
    assert len(read) == 6
    for group, tensors in payload.items():
        for name, t in tensors.items():
            assert torch.equal(read[f"{group}/{name}"], t)


def test_special_values_keep_their_bits() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    back = decode(encode({"g": Tensors(v=values)}))["g"]["v"]
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


def test_a_channels_last_tensor_travels_by_value() -> None:
    t = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert torch.equal(decode(encode({"g": Tensors(t=t)}))["g"]["t"], t)


def test_notes_ride_along() -> None:
    payload, notes = decode_with_notes(encode(sample(), {"round": 3, "why": "ü"}))
    assert notes == {"round": 3, "why": "ü"}
    assert "odd" in payload


def test_encode_into_fills_a_larger_buffer_from_its_start() -> None:
    payload = sample()
    buffer = bytearray(10_000)
    used = encode_into(memoryview(buffer), payload)
    assert used == size_in_bytes(payload)
    assert same(decode(buffer[:used]), payload)


@pytest.mark.parametrize("cut", [0, 4, 9, 60, -1])
def test_a_torn_message_is_refused(cut: int) -> None:
    blob = bytes(encode(sample()))
    with pytest.raises(ValueError, match="not a payload"):
        decode(blob[:cut])


def test_a_message_with_tensors_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="not a payload"):
        decode(library_save({"stray": torch.ones(2)}))


@pytest.mark.parametrize(("offsets", "fine"), [([4, 8], True), ([8, 12], False), ([0, 4], False)])
def test_a_message_whose_tensors_leave_a_gap_or_overlap_is_refused(offsets: list[int], fine: bool) -> None:
    """Two floats, the first in bytes 0 to 4."""
    entries = {
        f"g/{n}": {"dtype": "F32", "shape": [1], "data_offsets": at} for n, at in (("a", [0, 4]), ("b", offsets))
    }
    about = {"layout": json.dumps({"g": ["a", "b"]}), "notes": "{}"}
    header = json.dumps({"__metadata__": about, **entries}).encode()
    blob = len(header).to_bytes(8, "little") + header + bytes(max(8 if fine else 0, *offsets))
    if fine:
        assert list(decode(blob)["g"]) == ["a", "b"]
    else:
        with pytest.raises(ValueError, match="not a payload"):
            decode(blob)


def test_group_names_may_not_hold_a_slash() -> None:
    with pytest.raises(ValueError, match="a/b"):
        encode({"a/b": Tensors()})


def test_the_digest_sees_values_names_types_and_shapes_but_not_order() -> None:
    base = {"g": Tensors(a=torch.ones(4), b=torch.zeros(2))}
    assert digest(base) == digest({"g": Tensors(b=torch.zeros(2), a=torch.ones(4))})
    others = [
        {"g": Tensors(a=torch.ones(4), b=torch.tensor([0.0, -0.0]))},
        {"g": Tensors(a=torch.ones(2, 2), b=torch.zeros(2))},
        {"g": Tensors(a=torch.ones(4), c=torch.zeros(2))},
        {"g": Tensors(a=torch.ones(4), b=torch.zeros(2, dtype=torch.int32))},
    ]
    assert len({digest(base), *map(digest, others)}) == 5


def test_the_ledger_counts_tensor_bytes_by_group() -> None:
    """3*4 + 1 floats of 4 bytes; flags 3 bytes, a 64-bit counter, three halves: 3 + 8 + 6."""
    assert size_of(sample()) == {"parameters": 52, "buffers": 0, "odd": 17}


def test_a_payload_of_more_than_48_mb_is_read() -> None:
    """The product of a tensor's offsets has no meaning: it exceeds what a size may be long before a size does."""
    payload: Payload = {"data": Tensors(x=torch.zeros(60 << 20, dtype=torch.uint8), y=torch.zeros(2 << 20).byte())}
    assert decode(encode(payload))["data"]["y"].shape == (2 << 20,)
