"""What a federation is to the round loop, and what one round yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from fedskew.core.method import Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload

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
