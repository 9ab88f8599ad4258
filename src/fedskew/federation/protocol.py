"""What a federation is to the round loop, and what one round yields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from fedskew.core.method import Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.evaluation.metrics import ClientRow, Metrics

ServerSite = Callable[[int, str], Site]  # (round, stage) -> the server's site; stage "evaluate": on its test set
SCHEMA = 1  # of records; raised when a reader of older files would misread a newer one


class Reply(NamedTuple):
    """What came of asking one client: an update, or why there is none."""

    client: int
    update: Update | None
    note: str = ""
    seconds: float = 0.0


class Federation(Protocol):
    """Owns the clients' data and their state, wherever they are; the server sees neither."""

    population: int  # clients in all

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        """Replies in client order, as a stream; new client states are held back until `commit`."""
        ...

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        """The round counts: the accepted clients' new states replace their old ones; others' are dropped."""
        ...

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        """The metrics of the model after this round, as far as they are known now."""
        ...

    def per_client(self) -> dict[str, ClientRow]:
        """Each client's own figures in the last evaluation, by client number."""
        ...

    def late_metrics(self) -> Metrics | None:
        """Client figures of the round before, where they arrive one round late; None where they do not."""
        ...


class QuorumLost(RuntimeError):
    """Too few clients gave a usable update: the round does not count, and the run stops after the last one that did."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one round did. Rounds and clients are counted from 0."""

    round: int
    stage: str  # see Method.stages
    cohort: list[int]  # clients that were asked
    trained: list[int]  # clients whose updates count
    lost: dict[int, str]  # client -> why its work does not count
    bytes_down: dict[str, int]  # by group of the payload, over all clients asked
    bytes_up: dict[str, int]  # by group, over the clients whose updates count
    client_seconds: float  # over all clients
    server_seconds: float  # aggregation and what the method does on the server
    evaluate_seconds: float
    seconds: float  # wall clock of the whole round
    training: dict[str, float]  # means over clients, by weight, of what updates report (loss, ...)
    metrics: Metrics | None  # None: not evaluated in this round
    before: Metrics | None = None  # client figures of the round before, where they arrive one round late
    server: Any = None  # the server's state after the round (a Payload); kept in checkpoints, not in the record's file
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """All but the server's state, as plain values: a line of records.jsonl."""
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, server=None), str_keys=True)
        return {key: value for key, value in plain.items() if key not in ("server", "before")} | (
            {"before": plain["before"]} if self.before is not None else {}
        )


def merge_late(records: Iterable[Record]) -> list[Record]:
    """Records with the client figures that arrived a round late put where they belong."""
    merged: list[Record] = []
    for record in records:
        if record.before is not None and merged and merged[-1].metrics is not None:
            whole = merged[-1].metrics.with_clients_of(record.before)
            merged[-1] = msgspec.structs.replace(merged[-1], metrics=whole)
        merged.append(msgspec.structs.replace(record, before=None))
    return merged
