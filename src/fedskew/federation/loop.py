"""The round loop, the only one there is: it drives any federation, wherever its clients are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedskew.evaluate import by_third, score_of
from fedskew.federation.wire import Entry, layout_of, size_of
from fedskew.method import Method, Update
from fedskew.site import Data, Site, one_thread, seeded
from fedskew.tensors import Payload

COHORT = 4  # what a generator is for: part of its seed (see world.py)
ServerSite = Callable[[int, str], Site]  # (round, stage) -> the server's site; to "evaluate", on the test set


class Reply(NamedTuple):
    """What came of asking one client: an update, or why there is none."""

    client: int
    update: Update | None
    note: str = ""
    seconds: float = 0.0


class Federation(Protocol):
    """Owns the clients' data and their state, wherever they are; the server sees neither."""

    population: int

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        """Replies in client order, as a stream; new client states are held back until `commit`."""
        ...

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        """The round counts: the accepted clients' new states replace their old ones; others' are dropped."""
        ...

    def evaluate(self, round: int, broadcast: Payload) -> dict[str, Any]:
        """Metrics in the words of `evaluate.py`."""
        ...


class QuorumLost(RuntimeError):
    """Too few clients answered: the round does not count, and the run stops where it was."""


@dataclass(frozen=True)
class Record:
    """What one round yields."""

    round: int
    stage: str
    cohort: list[int]
    trained: list[int]
    lost: dict[int, str]  # client -> why its work does not count
    bytes_down: dict[str, int]  # by group, all clients together
    bytes_up: dict[str, int]
    client_seconds: float  # all clients together
    server_seconds: float  # aggregation and what the method does on the server
    evaluate_seconds: float
    seconds: float  # wall clock of the whole round
    training: dict[str, float]  # means over clients, by weight, of what updates report (loss, ...)
    metrics: dict[str, Any] | None  # None: not evaluated in this round
    server: Payload = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the server's state, as plain values."""
        return asdict(replace(self, server={})) | {"lost": {str(k): v for k, v in self.lost.items()}, "server": None}


def draw_cohort(population: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """This round's clients: uniform without replacement, by (seed, round) alone, so every method sees the same."""
    order = torch.randperm(len(population), generator=seeded(seed, COHORT, 0, round))
    return sorted(population[int(i)] for i in order[:size])


def run(
    method: Method,
    federation: Federation,
    site: ServerSite,
    rounds: int,
    cohort: Callable[[int], list[int]],
    *,
    quorum: int = 1,
    evaluate: Callable[[int], bool] = lambda round: True,
    start: tuple[int, Payload] | None = None,
) -> Iterator[Record]:
    """Yield one record a round. Logging, checkpoints and early stopping belong to the caller.

    `start` is (next round, server state) of a run that is taken up again.
    """
    first, server = start if start is not None else (0, None)
    layouts: dict[str, tuple[Entry, ...]] = {}
    for round, stage in list(enumerate(method.stages(rounds)))[first:]:
        with one_thread():
            began = time.perf_counter()
            if server is None:
                server = method.init_server(site(0, "init"))
            broadcast = method.broadcast(server)
            if stage not in layouts:
                layouts[stage] = expected_layout(method, site(round, stage), broadcast)
            asked = cohort(round)
            intake = Intake(federation.train(round, stage, asked, broadcast), layouts[stage], quorum)
            server = method.aggregate(site(round, stage), server, iter(intake))
            intake.finish()
            federation.commit(round, intake.accepted)
            done = time.perf_counter()
            metrics = None
            if evaluate(round):
                metrics = federation.evaluate(round, method.broadcast(server))
                metrics |= ensemble_figures(method, site(round, "evaluate"), server, metrics.get("groups", {}))
            end = time.perf_counter()
        yield Record(
            round=round,
            stage=stage,
            cohort=asked,
            trained=intake.accepted,
            lost=intake.lost,
            bytes_down={group: size * len(asked) for group, size in size_of(broadcast).items()},
            bytes_up=intake.bytes,
            client_seconds=intake.client_seconds,
            server_seconds=max(0.0, done - began - intake.waited),
            evaluate_seconds=end - done,
            seconds=end - began,
            training=intake.means(),
            metrics=metrics,
            server=server,
        )


def ensemble_figures(
    method: Method, site: Site, server: Payload, groups: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The figures of what the server could predict with beside its model, if there is such a thing."""
    logits = method.ensemble(site, server) if len(site.data) else None
    if logits is None:
        return {}
    result = score_of(logits, site.data.labels, site.classes)
    return {"ensemble": result.as_dict() | by_third(result, groups)}


class Intake:
    """The border where replies become updates: checked, counted, handed on one at a time."""

    def __init__(self, replies: Iterator[Reply], layout: tuple[Entry, ...], quorum: int) -> None:
        self.replies, self.layout, self.quorum = replies, layout, quorum
        self.accepted: list[int] = []
        self.lost: dict[int, str] = {}
        self.bytes: dict[str, int] = {}
        self.client_seconds = self.waited = self.weight = 0.0
        self.sums: dict[str, float] = {}
        self.spent = False
        self.first = next(self._checked(), None)
        if self.first is None:
            self._enough()

    def __iter__(self) -> Iterator[Update]:
        if self.first is not None:
            yield self.first
            yield from self._checked()
        self._enough()

    def finish(self) -> None:
        """A method need not read to the end; the replies it left are taken and dropped."""
        if not self.spent:
            for _ in self._checked():
                pass
            self._enough()

    def means(self) -> dict[str, float]:
        return {name: total / self.weight for name, total in self.sums.items()} if self.weight else {}

    def _enough(self) -> None:
        if len(self.accepted) < self.quorum:
            reasons = "; ".join(f"client {client} {why}" for client, why in list(self.lost.items())[:3])
            raise QuorumLost(
                f"{len(self.accepted)} of {len(self.accepted) + len(self.lost)} clients gave a usable update, "
                f"{self.quorum} are needed ({reasons or 'nobody was asked'})"
            )

    def _checked(self) -> Iterator[Update]:
        while True:
            began = time.perf_counter()
            reply = next(self.replies, None)
            self.waited += time.perf_counter() - began
            if reply is None:
                self.spent = True
                return
            self.client_seconds += reply.seconds
            why = reply.note if reply.update is None else fault_of(reply.update, self.layout)
            if reply.update is None or why:
                self.lost[reply.client] = why
                continue
            self.accepted.append(reply.client)
            for group, size in size_of(reply.update.payload).items():
                self.bytes[group] = self.bytes.get(group, 0) + size
            self.weight += reply.update.weight
            for name, value in reply.update.metrics.items():
                self.sums[name] = self.sums.get(name, 0.0) + value * reply.update.weight
            yield reply.update


def fault_of(update: Update, layout: tuple[Entry, ...]) -> str:
    """Why an update cannot be used, or ''. Groups, names, types and shapes must be those of this method's client."""
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
            return f"sent {name} as {_shape(given[name])}, wanted {_shape(wanted[name])}"
    for group, tensors in update.payload.items():
        for name, t in tensors.items():
            if t.is_floating_point() and not _finite(t):
                return f"sent a value that is not finite in {group}/{name}"
    return ""


def _by_name(layout: tuple[Entry, ...]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    return ((f"{group}/{name}", (kind, shape)) for group, name, kind, shape in layout)


def _shape(entry: tuple[str, tuple[int, ...]]) -> str:
    return f"{entry[0]}{list(entry[1])}"


def _finite(t: Tensor) -> bool:
    # the sum is finite unless a value is not, or it overflows: only then is every value looked at
    return math.isfinite(t.sum().item()) or bool(t.isfinite().all())


def expected_layout(method: Method, site: Site, broadcast: Payload) -> tuple[Entry, ...]:
    """What this method's client sends, learnt by one step on made-up samples, one of each class."""
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
