"""Payloads as bytes in the safetensors format, with keys `group/name`. Lossless; nothing is pickled.

The metadata in the header list groups and names in order: sums are taken in this order, and a group without tensors
would not appear otherwise.

The format is implemented here instead of using the library, because the simulator encodes and decodes a payload for
every client. Encoding copies once, decoding not at all, and the header is built once for each layout, which takes a
quarter of the library's time (docs/decisions/0003). Tests compare it with the library in both directions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedskew.core.tensors import Payload, Tensors, VectorLayout, vector_layout

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {kind: name for name, kind in KINDS.items()}
TensorSpec = tuple[str, str, str, tuple[int, ...]]  # group, name, kind, shape
Layout = tuple[TensorSpec, ...]  # of a payload, in order
Header = tuple[tuple["Group", ...], str]  # groups of tensors in order, notes
LARGEST = 1 << 50  # elements of a tensor, and bytes of a payload; more is nonsense, and would overflow
HEADER_PER_TENSOR = 1000  # bytes of a peer's header per expected tensor, at most; ours have about 100


class Group(NamedTuple):
    """Where the tensors of one group are, as a header says; worked out once for each header."""

    name: str
    entries: tuple[tuple[TensorSpec, int], ...]  # (tensor, offset) in order
    flat: tuple[torch.dtype, int, int] | None  # type, count and offset if they are one vector; None: they are not
    layout: VectorLayout  # their names and shapes


def layout_of(payload: Payload) -> Layout:
    """Groups, names, types and shapes of a payload."""
    return tuple(chain.from_iterable(_specs(group, tensors) for group, tensors in payload.items()))


def _specs(group: str, tensors: Tensors) -> Layout:
    """The tensors of a group; of views of one vector they are worked out once for each layout."""
    if tensors.flat is None or tensors.layout is None:
        return tuple((group, name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
    layout, kind = tensors.layout, NAMES[tensors.flat.dtype]
    if (group, kind) not in layout.known:
        pairs = zip(layout.names, layout.shapes, strict=True)
        layout.known[group, kind] = tuple((group, name, kind, tuple(shape)) for name, shape in pairs)
    specs: Layout = layout.known[group, kind]
    return specs


@lru_cache(maxsize=256)
def _plan(layout: Layout, groups: tuple[str, ...], notes: str) -> tuple[bytes, tuple[int, ...], int]:
    """(header, offset of each tensor after the header, bytes of data). Wide types come first, so all are aligned."""
    if bad := [group for group in groups if "/" in group]:
        raise ValueError(f"the name of a group must not contain '/', got {bad[0]}")
    order = sorted(range(len(layout)), key=lambda i: -KINDS[layout[i][2]].itemsize)
    offsets, entries, end = [0] * len(layout), {}, 0
    for i in order:
        group, name, kind, shape = layout[i]
        offsets[i], start = end, end
        end += KINDS[kind].itemsize * torch.Size(shape).numel()
        entries[f"{group}/{name}"] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    names = {group: [name for g, name, *_ in layout if g == group] for group in groups}
    header = {"__metadata__": {"layout": json.dumps(names), "notes": notes}, **entries}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, tuple(offsets), end


def size_in_bytes(payload: Payload, notes: Mapping[str, Any] | None = None) -> int:
    """The length of `encode(payload, notes)`."""
    header, _, end = _plan(layout_of(payload), tuple(payload), json.dumps(notes or {}))
    return len(header) + end


def size_of_layout(layout: Layout) -> int:
    """Bytes of the tensors of a payload with this layout, without the header."""
    return sum(KINDS[kind].itemsize * math.prod(shape) for _, _, kind, shape in layout)


def encode_into(buffer: memoryview, payload: Payload, notes: Mapping[str, Any] | None = None) -> int:
    """Write the payload to the start of `buffer`; returns the number of bytes written."""
    header, offsets, end = _plan(layout_of(payload), tuple(payload), json.dumps(notes or {}))
    buffer[: len(header)] = header
    first = 0
    for group in payload.values():
        count = len(group) if group.layout is None else len(group.layout.names)
        places = offsets[first : first + count]
        first += count
        if group.flat is not None and places == _consecutive(places[0], vector_layout(group), group.flat):
            group = Tensors(all=group.flat)
        for offset, t in zip(places, group.values(), strict=False):
            _tensor(buffer, t.dtype, tuple(t.shape), len(header) + offset).copy_(t)
    return len(header) + end


def _consecutive(start: int, layout: VectorLayout, vector: Tensor) -> tuple[int, ...]:
    """Offsets of the parts of a vector if they follow each other without gaps."""
    sizes = [shape.numel() * vector.element_size() for shape in layout.shapes]
    return (start, *(start + end for end in accumulate(sizes[:-1])))


def encode(payload: Payload, notes: Mapping[str, Any] | None = None) -> bytearray:
    """The payload as safetensors bytes, with `notes` in the header."""
    blob = bytearray(size_in_bytes(payload, notes))
    encode_into(memoryview(blob), payload, notes)
    return blob


def _read_header(header: bytes, data: int, most: int | None = None) -> Header:
    """The parsed header, all in order. The tensors must cover `data` bytes exactly; `most` limits their number."""
    parsed = json.loads(header)
    about = parsed.pop("__metadata__")
    if most is not None and len(parsed) > most:
        raise ValueError(f"it has {len(parsed)} tensors, expected at most {most}")
    spans = sorted(_sizes(entry["data_offsets"], 2) for entry in parsed.values())
    starts, ends = [a for a, _ in spans], [b for _, b in spans]
    if starts != [0, *ends[:-1]][: len(starts)] or (ends[-1] if ends else 0) != data:
        raise ValueError("tensors overlap, leave a gap, or are truncated")
    groups = []
    for group, names in json.loads(about["layout"]).items():
        entries = []
        for name in names:
            entry = parsed.pop(f"{group}/{name}")
            kind, shape = entry["dtype"], _sizes(entry["shape"])
            start, end = entry["data_offsets"]
            if KINDS[kind].itemsize * math.prod(shape) != end - start:
                raise ValueError(f"{group}/{name} has {end - start} bytes for shape {shape}")
            entries.append(((group, name, kind, shape), start))
        groups.append(_group(group, entries))
    if parsed:
        raise ValueError(f"{len(parsed)} tensors are not in the layout")
    if not isinstance(about["notes"], str):
        raise ValueError("the notes are not text")
    return tuple(groups), about["notes"]


_cached_header = lru_cache(maxsize=256)(_read_header)


def _sizes(values: Any, count: int | None = None) -> tuple[int, ...]:
    """Whole numbers of at least 0: with `count` so many of them (offsets), else a shape, whose product is a size."""
    numbers = tuple(values)
    if any(type(n) is not int or n < 0 for n in numbers) or (count is not None and len(numbers) != count):
        raise ValueError(f"{str(numbers)[:100]} are not sizes")
    size = math.prod(max(n, 1) for n in numbers) if count is None else max(numbers)
    if len(numbers) > 64 or size > LARGEST:
        raise ValueError(f"{str(numbers)[:100]} is too large")
    return numbers


def decode(blob: bytes | bytearray | memoryview) -> Payload:
    """The payload in `blob`. Its tensors share memory with `blob`, unless that is read-only."""
    return decode_with_notes(blob)[0]


def decode_from_peer(blob: bytes | bytearray | memoryview, tensors: int) -> Payload:
    """The payload in bytes that another machine sent; ValueError if it is not one or has more than `tensors` tensors.

    A header that is too long is not parsed, and none is kept: a peer may send a new one every round.
    """
    if int.from_bytes(memoryview(blob)[:8], "little") > HEADER_PER_TENSOR * (tensors + 10):
        raise ValueError(f"not a payload: the header is too long for {tensors} tensors")
    return _decode(blob, partial(_read_header, most=tensors))[0]


def decode_with_notes(blob: bytes | bytearray | memoryview) -> tuple[Payload, dict[str, Any]]:
    """The payload and the notes in `blob`; ValueError if it is not a payload."""
    return _decode(blob, _cached_header)


def _decode(
    blob: bytes | bytearray | memoryview, read_header: Callable[[bytes, int], Header]
) -> tuple[Payload, dict[str, Any]]:
    view = blob if isinstance(blob, memoryview) else memoryview(blob)  # tensors keep this very object alive
    if view.readonly:  # tensors are writable
        view = memoryview(bytearray(view))
    size = int.from_bytes(view[:8], "little")
    if not 0 < size <= len(view) - 8:
        raise ValueError("not a payload: the header is truncated")
    try:
        groups, notes = read_header(bytes(view[8 : 8 + size]), len(view) - 8 - size)
        return {group.name: _tensors(view, group, 8 + size) for group in groups}, json.loads(notes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a payload: {error}") from None


def _group(name: str, entries: list[tuple[TensorSpec, int]]) -> Group:
    """A group, whose tensors are one vector if they have one type and follow each other."""
    counts = [math.prod(shape) for (_, _, _, shape), _ in entries]
    layout = VectorLayout(tuple(s[1] for s, _ in entries), tuple(torch.Size(s[3]) for s, _ in entries))
    if not sum(counts):
        return Group(name, tuple(entries), None, layout)
    kind, offset = entries[0][0][2], entries[0][1]
    ends = [offset + KINDS[kind].itemsize * end for end in accumulate(counts, initial=0)]
    apart = any(spec[2] != kind or at != end for (spec, at), end in zip(entries, ends, strict=False))
    return Group(name, tuple(entries), None if apart else (KINDS[kind], sum(counts), offset), layout)


def _tensors(view: memoryview, group: Group, start: int) -> Tensors:
    """The tensors of a group in a payload whose data begin at `start`: views of one vector, if they are one."""
    if group.flat is None:
        return Tensors(
            {name: _tensor(view, KINDS[kind], shape, start + at) for (_, name, kind, shape), at in group.entries}
        )
    kind, count, offset = group.flat
    return Tensors.views(torch.frombuffer(view, dtype=kind, count=count, offset=start + offset), group.layout)


def _tensor(view: memoryview, kind: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(view, dtype=kind, count=count, offset=offset).view(shape)


def encode_plain(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors by name as an ordinary safetensors file, which any reader of the format loads."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, end = [], 0
    for name, t in tensors.items():
        parts.append(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        start, end = end, end + len(parts[-1])
        entries[name] = {"dtype": NAMES[t.dtype], "shape": tuple(t.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def digest(payload: Payload) -> str:
    """SHA-256 of a payload's names, types, shapes and bytes. The order of groups and names does not matter."""
    sha = hashlib.sha256()
    for group in sorted(payload):
        for name in sorted(payload[group]):
            t = payload[group][name].contiguous()
            sha.update(f"{group}/{name}|{NAMES[t.dtype]}|{tuple(t.shape)}|".encode())
            sha.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def size_of(payload: Payload) -> dict[str, int]:
    """Bytes of tensor data by group."""
    return {group: sum(t.nbytes for t in _parts(tensors)) for group, tensors in payload.items()}


def _parts(tensors: Tensors) -> Iterable[Tensor]:
    """The vector that the tensors are views of, or the tensors."""
    return tensors.values() if tensors.flat is None else (tensors.flat,)
