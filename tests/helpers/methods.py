"""Tests that run every method: `make check` runs a few of each kind, `make test` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# a mean, a state of clients, personal heads and models, class statistics, public data, a generator, a stage of its own
FEW = ("fedavg", "scaffold", "fedper", "ditto", "fedmr", "fedddc", "fedpg", "ccvr", "local")


def each(names: Iterable[str]) -> list[Any]:
    """The methods as parameters of a test, of which all but `FEW` are marked slow."""
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in names]
