"""The interface between the round loop and a federation, and the record of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from fedskew.core.method import Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.evaluation.metrics import ClientRow, Metrics

ServerSite = Callable[[int, str], Site]  # (round, stage) -> the server's site; in stage "evaluate" with its test set
SCHEMA = 1  # version of the records' format; increased when a reader of older files would misread a newer one


class Reply(NamedTuple):
    """The reply of one client: an update, or None and the reason."""

    client: int
    update: Update | None
    note: str = ""  # why there is no update
    seconds: float = 0.0  # how long the client worked


class Federation(Protocol):
    """The clients, simulated or on a network. It owns their data and their states; the server sees neither."""

    population: int  # number of clients

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        """Train the clients of the cohort; yields one reply each, in the order of the cohort.

        New client states take effect with `commit`.
        """
        ...

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        """End a round: the new states of accepted clients replace their old ones; those of others are dropped."""
        ...

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        """Evaluate the model after this round. In a deployment the clients' metrics follow in `late_metrics`."""
        ...

    def per_client(self) -> dict[str, ClientRow]:
        """Each client's metrics in the last evaluation, by client number."""
        ...

    def confusion(self) -> dict[str, list[list[int]]]:
        """Samples by true and predicted class in the last evaluation, see `Summary.confusion`."""
        ...

    def own_figures(self) -> list[tuple[int, dict[int, tuple[float, float]]]]:
        """(round, (accuracy, loss) of each client's own model by client number), as far as they became known now."""
        ...

    def late_metrics(self) -> Metrics | None:
        """The clients' metrics of the previous round, which arrived in this one; None if nothing arrives late."""
        ...


class QuorumLost(RuntimeError):
    """Too few clients sent a usable update. The round does not count; the run can be resumed from the one before."""


class Diverged(QuorumLost):
    """No update is usable because all contain values that are not finite. A resumed run would fail in the same way."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one round. Clients are counted from 0.

    `number` is the round counted from 1, as on the screen; `round` counts from 0, as methods and seeds do. A line of
    records.jsonl holds both.
    """

    round: int  # counted from 0; see `number`
    stage: str  # see Method.stages
    cohort: list[int]  # clients that were asked to train
    trained: list[int]  # clients whose updates were aggregated
    lost: dict[int, str]  # client -> why its update was not
    bytes_down: dict[str, int]  # by group of the payload, summed over the cohort
    bytes_up: dict[str, int]  # by group, summed over the clients whose updates were aggregated
    client_seconds: float  # summed over all clients
    server_seconds: float  # aggregation and the method's other work on the server
    evaluate_seconds: float
    seconds: float  # wall-clock time of the round
    # weighted means over clients of the numbers that updates report (loss, ...); None in a file: not finite
    training: dict[str, float | None]
    metrics: Metrics | None  # None: not evaluated after this round
    before: Metrics | None = None  # the clients' metrics of the previous round, see Federation.late_metrics
    # why the run counts as diverged from this round on (see federation/divergence.py); "": it does not
    diverged: str = ""
    validation: float | None = None  # the figure on validation data that early stopping looks at; None: there is none
    shares: dict[int, float] = {}  # client -> how much of it is in the robust mean; empty without robust aggregation
    epsilon: float | None = None  # privacy spent after this round, see federation/private.py; None: no noise was added
    server: Any = None  # the server's state after the round (a Payload); saved in checkpoints, not in records.jsonl
    schema: int = SCHEMA

    @property
    def number(self) -> int:
        """The round counted from 1: the first is 1, the last is the number of rounds."""
        return self.round + 1

    def as_dict(self) -> dict[str, Any]:
        """Everything except the server's state as plain values: a line of records.jsonl."""
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, server=None), str_keys=True)
        if_empty = ("before", "diverged", "validation", "shares", "epsilon")
        left_out = {"server", *(key for key in if_empty if plain[key] in (None, "", {}))}
        return {"number": self.number} | {key: value for key, value in plain.items() if key not in left_out}


def merge_late(records: Iterable[Record]) -> list[Record]:
    """The records with late client metrics (`before`) moved to the round they belong to."""
    merged: list[Record] = []
    for record in records:
        if record.before is not None and merged and merged[-1].metrics is not None:
            metrics = merged[-1].metrics.with_clients_of(record.before)
            merged[-1] = msgspec.structs.replace(merged[-1], metrics=metrics)
        merged.append(msgspec.structs.replace(record, before=None))
    return merged
