"""Simulated faults of clients.

    drop       the client does not answer              nan, inf   its update contains such values
    straggle   it answers too late                     shape      its update has a wrong shape
    raise      its training raises an error            die        its process is killed

Text form: `nan:rate=0.1`, `die:client=3,round=2`, several joined by `+`; clients and rounds are counted from 0.
Whether a fault occurs is a random draw seeded with (seed, client, round), so it does not depend on the number of
workers.
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
    """One kind of fault, and when it occurs."""

    kind: Kind
    rate: Annotated[float, Meta(ge=0, le=1)] = 1.0  # probability for each client and round
    client: int | None = None  # None: any client
    round: int | None = None  # counted from 0, so one less than on the screen; None: any round

    def occurs(self, seed: int, client: int, round: int) -> bool:
        """Whether this fault occurs at this client in this round of a run with this seed."""
        if self.client not in (None, client) or self.round not in (None, round):
            return False
        key = (seed, Purpose.FAULT, client + 1, round, KINDS.index(self.kind))
        return self.rate >= 1 or bool(torch.rand((), generator=seeded(*key)) < self.rate)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from their text form; "" gives no faults."""
    faults = []
    for name, options in parse(text, "fault") if text else []:
        if name not in KINDS:
            raise unknown("fault", name, KINDS)
        faults.append(build(Fault, {"kind": name, **options}, f"fault {name}"))
    return tuple(faults)


def fault_at(faults: tuple[Fault, ...], seed: int, client: int, round: int) -> Kind | None:
    """The kind of the first fault that occurs at this client in this round; None if none does."""
    return next((f.kind for f in faults if f.occurs(seed, client, round)), None)


def corrupt(update: Update, kind: Kind) -> Update:
    """A copy of the update whose first tensor has the fault `kind`: nan, inf or shape."""
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": lambda t: torch.full_like(t, torch.nan),
        "inf": lambda t: torch.full_like(t, torch.inf),
        "shape": lambda t: t.reshape(-1)[:-1],
    }
    group = next(iter(update.payload))
    name = next(iter(update.payload[group]))
    tensors = update.payload[group] | {name: change[kind](update.payload[group][name])}
    return replace(update, payload=update.payload | {group: tensors})
