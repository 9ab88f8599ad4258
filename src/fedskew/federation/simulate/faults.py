"""Simulated faults: what real clients do wrong.

    drop       the client does not answer              nan, inf   its update holds such a value
    straggle   it answers too late to count            shape      its update has a wrong shape
    raise      its training fails with an error        die        its process is killed

Text form: `nan:rate=0.1`, `die:client=3,round=2`, several joined by `+`. A fault is drawn by (seed, client, round).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import torch
from msgspec import Meta
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.settings import build, parse, unknown

Kind = Literal["drop", "straggle", "nan", "inf", "shape", "raise", "die"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Fault:
    """One kind of fault: how often, at which client (None: any), in which round (None: any, from 0)."""

    kind: Kind
    rate: Annotated[float, Meta(ge=0, le=1)] = 1.0
    client: int | None = None  # None: any
    round: int | None = None

    def strikes(self, seed: int, client: int, round: int) -> bool:
        if self.client not in (None, client) or self.round not in (None, round):
            return False
        key = (seed, Purpose.FAULT, client + 1, round, KINDS.index(self.kind))
        return self.rate >= 1 or bool(torch.rand((), generator=seeded(*key)) < self.rate)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from their text form; "" is none."""
    faults = []
    for name, options in parse(text, "fault") if text else []:
        if name not in KINDS:
            raise unknown("fault", name, KINDS)
        faults.append(build(Fault, {"kind": name, **options}, f"fault {name}"))
    return tuple(faults)


def struck(faults: tuple[Fault, ...], seed: int, client: int, round: int) -> Kind | None:
    """The first fault that strikes this client in this round."""
    return next((f.kind for f in faults if f.strikes(seed, client, round)), None)


def spoilt(update: Update, kind: Kind) -> Update:
    """The update as a faulty client would send it."""
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": lambda t: torch.full_like(t, torch.nan),
        "inf": lambda t: torch.full_like(t, torch.inf),
        "shape": lambda t: t.reshape(-1)[:-1],
    }
    group = next(iter(update.payload))
    name = next(iter(update.payload[group]))
    tensors = update.payload[group] | {name: change[kind](update.payload[group][name])}
    return replace(update, payload=update.payload | {group: tensors})
