"""Simulated faults of clients, and attacks by them.

    drop       the client does not answer              nan, inf   its update contains such values
    straggle   it answers too late                     shape      its update has a wrong shape
    raise      its training raises an error            die        its process is killed

Attacks, with d the client's honest update, as change from what it received, and s = `strength`:

    signflip   sends -s d (s = 1)                      scale      sends s d (s = 10)
    noise      sends N(0, (s r)^2), r the root mean square of d (s = 10)
    labels     trains on the labels C - 1 - y
    alie       "a little is enough" (arXiv:1902.06156): the attackers of a round train honestly, and all send the mean
               of their updates minus s standard deviations (s = 1.5), entry by entry. They know only their own
               updates, not those of honest clients; a lone attacker has no deviation and sends its update

Text form: `nan:rate=0.1`, `die:client=3,round=2`, `signflip:first=4`, several joined by `+`; clients and rounds are
counted from 0.
Whether a fault occurs is a random draw seeded with (seed, client, round), so it does not depend on the number of
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import torch
from msgspec import Meta
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.settings import build, parse, unknown
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Natural, Positive
from fedskew.federation.robust import flat, unflat

Attack = Literal["signflip", "scale", "noise", "labels", "alie"]
Kind = Literal[
    "drop", "straggle", "nan", "inf", "shape", "raise", "die", "signflip", "scale", "noise", "labels", "alie"
]
KINDS: tuple[Kind, ...] = get_args(Kind)  # the order decides random draws: append only
STRENGTH: dict[str, float] = {"signflip": 1.0, "scale": 10.0, "noise": 10.0, "alie": 1.5}


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and when it occurs."""

    kind: Kind
    rate: Annotated[float, Meta(ge=0, le=1)] = 1.0  # probability for each client and round
    client: int | None = None  # None: any client
    round: int | None = None  # counted from 0, so one less than on the screen; None: any round
    first: Natural | None = None  # only clients 0 to first - 1; None: any client
    strength: Positive | None = None  # of an attack; None: the attack's own, see above

    def occurs(self, seed: int, client: int, round: int) -> bool:
        """Whether this fault occurs at this client in this round of a run with this seed."""
        if self.client not in (None, client) or self.round not in (None, round):
            return False
        if self.first is not None and client >= self.first:
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


def fault_at(faults: tuple[Fault, ...], seed: int, client: int, round: int) -> Fault | None:
    """The first fault that occurs at this client in this round; None if none does."""
    return next((f for f in faults if f.occurs(seed, client, round)), None)


def attackers(faults: tuple[Fault, ...], seed: int, clients: Iterable[int], round: int) -> set[int]:
    """The clients that attack in this round."""
    found = {client: fault_at(faults, seed, client, round) for client in clients}
    return {client for client, fault in found.items() if fault is not None and fault.kind in get_args(Attack)}


def spoiled(update: Update, fault: Fault, broadcast: Payload, rng: torch.Generator) -> Update:
    """The update that a client with this fault sends in place of its own; `rng` is for the attack `noise`."""
    if fault.kind in ("nan", "inf", "shape"):
        return corrupt(update, fault.kind)
    if fault.kind not in ("signflip", "scale", "noise"):
        return update
    s = fault.strength or STRENGTH[fault.kind]
    change: Payload = {}
    for group, tensors in update.payload.items():
        base = origin(tensors, broadcast.get(group, {}))
        if fault.kind == "noise":
            change[group] = base + Tensors({name: noise_like(t - base[name], s, rng) for name, t in tensors.items()})
        else:
            change[group] = base + (tensors - base) * (-s if fault.kind == "signflip" else s)
        # a wrong type or a negative count would be seen at once
        floats = {n: t for n, t in change[group].items() if tensors[n].is_floating_point() and n != "count"}
        change[group] = tensors | floats
    return replace(update, payload=change)


def origin(tensors: Tensors, received: Mapping[str, Tensor]) -> Tensors:
    """What a client's tensors are changes from: those it received, or zeros. Prototypes and counts are no changes."""
    if "count" in tensors:
        return tensors.zeros()
    return Tensors({name: received.get(name, torch.zeros_like(t)).to(t.dtype) for name, t in tensors.items()})


def noise_like(d: Tensor, s: float, rng: torch.Generator) -> Tensor:
    """N(0, (s r)^2) with r the root mean square of d."""
    return torch.randn(d.shape, generator=rng).to(d.dtype) * (s * d.double().square().mean().sqrt().item())


def colluding(updates: Sequence[Update], fault: Fault) -> list[Update]:
    """The attack `alie`: all send the mean of the attackers' updates minus s standard deviations."""
    vectors = torch.stack([flat(update.payload) for update in updates]).double()
    sent = vectors.mean(0) - (fault.strength or STRENGTH["alie"]) * vectors.std(0, correction=0)
    payload = unflat(sent, [update.payload for update in updates])
    return [replace(update, payload=payload) for update in updates]


def corrupt(update: Update, kind: str) -> Update:
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
