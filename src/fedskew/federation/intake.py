"""Checks the replies of a round: each becomes an update to aggregate, or a reason why it cannot be used."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedskew.core.method import Method, Update
from fedskew.core.samples import Data
from fedskew.core.seeding import seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.federation.protocol import Diverged, QuorumLost, Reply
from fedskew.federation.wire import Layout, layout_of, size_of

NOT_FINITE = "sent a value that is not finite"


class Intake:
    """The replies of one round. Iterate over it for the usable updates, one at a time; it counts while it does so.

    `layout` is the required layout of an update. With fewer than `quorum` usable updates it raises QuorumLost
    (Diverged, if all clients sent values that are not finite).
    The first update is read at once, so that a round without any fails before it is aggregated.
    """

    def __init__(self, replies: Iterator[Reply], layout: Layout, quorum: int) -> None:
        self.replies, self.layout, self.quorum = replies, layout, quorum
        self.accepted: list[int] = []  # clients whose updates are usable
        self.lost: dict[int, str] = {}  # client -> why its update is not
        self.bytes: dict[str, int] = {}  # of usable updates, by group
        self.client_seconds = self.waited = 0.0
        self.sums: dict[str, float] = {}  # of the numbers that updates report, weighted
        self.weights: dict[str, float] = {}  # of the clients that report them: a site may keep a number to itself
        self.exhausted = False
        self.first = next(self._checked(), None)
        if self.first is None:
            self._check_quorum()

    def __iter__(self) -> Iterator[Update]:
        if self.first is not None:
            yield self.first
            yield from self._checked()
        self._check_quorum()

    def finish(self) -> None:
        """Check and count the replies that the method did not read."""
        if not self.exhausted:
            for _ in self._checked():
                pass
            self._check_quorum()

    def means(self) -> dict[str, float | None]:
        """Weighted means over clients of the numbers that updates report, such as the training loss."""
        return {name: total / self.weights[name] for name, total in self.sums.items() if self.weights[name]}

    def _check_quorum(self) -> None:
        if len(self.accepted) < self.quorum:
            if self.lost and all(why.startswith(NOT_FINITE) for why in self.lost.values()) and not self.accepted:
                raise Diverged(f"all {len(self.lost)} clients of the round sent values that are not finite")
            reasons = "; ".join(f"client {client} {why}" for client, why in list(self.lost.items())[:3])
            raise QuorumLost(
                f"{len(self.accepted)} of {len(self.accepted) + len(self.lost)} clients gave a usable update, "
                f"{self.quorum} are needed ({reasons or 'no client was asked'})"
            )

    def _checked(self) -> Iterator[Update]:
        while True:
            began = time.perf_counter()
            reply = next(self.replies, None)
            self.waited += time.perf_counter() - began
            if reply is None:
                self.exhausted = True
                return
            self.client_seconds += reply.seconds
            why = reply.note if reply.update is None else fault_of(reply.update, self.layout)
            if reply.update is None or why:
                self.lost[reply.client] = why
                continue
            self.accepted.append(reply.client)
            for group, size in size_of(reply.update.payload).items():
                self.bytes[group] = self.bytes.get(group, 0) + size
            for name, value in reply.update.metrics.items():
                self.sums[name] = self.sums.get(name, 0.0) + value * reply.update.weight
                self.weights[name] = self.weights.get(name, 0.0) + reply.update.weight
            in_order = layout_of(reply.update.payload) == self.layout
            yield reply.update if in_order else ordered(reply.update, self.layout)


def ordered(update: Update, layout: Layout) -> Update:
    """The update with groups and names in the order of the layout, since rules on whole vectors go by place."""
    names: dict[str, list[str]] = {}
    for group, name, *_ in layout:
        names.setdefault(group, []).append(name)
    given = update.payload
    made = {group: given[group].like(names[group]) for group in names}
    return replace(update, payload=made | {group: given[group] for group in given if group not in names})


def fault_of(update: Update, layout: Layout) -> str:
    """Why an update cannot be used; "" if it can. Its groups, names, types and shapes must be those of `layout`."""
    if not (update.weight > 0 and update.weight < float("inf")):
        return f"sent the weight {update.weight}"
    got = layout_of(update.payload)
    if got != layout:
        given, wanted = dict(_by_name(got)), dict(_by_name(layout))
        if missing := sorted(wanted.keys() - given.keys()):
            return f"sent no {missing[0]}"
        if extra := sorted(given.keys() - wanted.keys()):
            return f"sent {extra[0]}, which is not part of the update"
        if wrong := sorted(name for name in wanted if wanted[name] != given[name]):
            name = wrong[0]
            return f"sent {name} as {_shape(given[name])}, expected {_shape(wanted[name])}"
    for group, tensors in update.payload.items():
        if tensors.flat is not None and tensors.flat.is_floating_point() and _finite(tensors.flat):
            continue
        for name, t in tensors.items():
            if t.is_floating_point() and not _finite(t):
                return f"{NOT_FINITE} in {group}/{name}"
    return ""


def _by_name(layout: Layout) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    return ((f"{group}/{name}", (kind, shape)) for group, name, kind, shape in layout)


def _shape(entry: tuple[str, tuple[int, ...]]) -> str:
    return f"{entry[0]}{list(entry[1])}"


def _finite(t: Tensor) -> bool:
    # A finite sum implies finite values. The reverse is not true: the sum may overflow, so check every value then.
    return math.isfinite(t.sum().item()) or bool(t.isfinite().all())


def expected_layout(method: Method, site: Site, broadcast: Payload) -> Layout:
    """The layout of the updates that clients of this method send in this stage.

    `method.layout` declares it. If that returns None, one training step on random samples, one of each class,
    finds it out.
    """
    declared = method.layout(site, broadcast)
    if declared is not None:
        return layout_of(declared)
    rng = seeded(0)
    shape = (max(site.classes, 2), *site.data.x.shape[1:])
    if site.data.x.dtype == torch.uint8:
        x = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
    else:
        x = torch.randn(shape, generator=rng)
    y = torch.arange(len(x)) % site.classes
    data = Data(x, y, torch.arange(len(x)), site.data.mean, site.data.std)
    training = replace(site.training, steps=1, batch_size=len(x), augment="")
    update, _ = method.client(replace(site, data=data, training=training, client=0), broadcast, {})
    return layout_of(update.payload)
