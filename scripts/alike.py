"""Whether the figures of two runs are the same, where the order in which losses are summed may differ."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def alike(a: Any, b: Any) -> bool:
    """Whether figures are equal; losses up to rounding, as a simulation evaluates clients in common batches."""
    if isinstance(a, msgspec.Struct) and isinstance(b, msgspec.Struct):
        return alike(msgspec.structs.asdict(a), msgspec.structs.asdict(b))
    if isinstance(a, dict) and isinstance(b, dict):
        close = {key for key in a if key == "loss" and isinstance(a[key], float) and isinstance(b.get(key), float)}
        rest = a.keys() - close
        return (
            a.keys() == b.keys()
            and all(math.isclose(a[key], b[key], rel_tol=1e-5) for key in close)
            and all(alike(a[key], b[key]) for key in rest)
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)
