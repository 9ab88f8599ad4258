"""Figures computed from the records of rounds: what one round cost, and what it took to reach a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fedskew.evaluation.figures import at_least_as_good, leading_figure
from fedskew.evaluation.metrics import Metrics


class Round(Protocol):
    """What figures are computed from in one round's record."""

    @property
    def round(self) -> int: ...
    @property
    def bytes_up(self) -> Mapping[str, int]: ...
    @property
    def bytes_down(self) -> Mapping[str, int]: ...
    @property
    def client_seconds(self) -> float: ...
    @property
    def server_seconds(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def lost(self) -> Mapping[int, str]: ...
    @property
    def metrics(self) -> Metrics | None: ...


def round_costs(record: Round) -> dict[str, float]:
    """What one round cost, by key of `COSTS`: bytes summed over groups of tensors, seconds, updates that were lost."""
    return {
        "bytes_up": sum(record.bytes_up.values()),
        "bytes_down": sum(record.bytes_down.values()),
        "client_seconds": record.client_seconds,
        "server_seconds": record.server_seconds,
        "seconds": record.seconds,
        "lost": len(record.lost),
    }


def to_target(records: Iterable[Round], target: float, goal: str | None = None) -> dict[str, float | None]:
    """Rounds and bytes (up and down) until the leading figure first reaches `target`, a share from 0 to 1.

    `goal` is another figure to look at, see `leading_figure`. Both are None if no evaluated round reaches the target.
    """
    spent = 0
    for record in records:
        spent += sum(record.bytes_up.values()) + sum(record.bytes_down.values())
        figure = leading_figure(record.metrics, goal)
        reached = figure.of(record.metrics) if figure is not None else None
        if figure is not None and reached is not None and at_least_as_good(reached, target, figure.better):
            return {"rounds": record.round + 1, "bytes": spent}
    return {"rounds": None, "bytes": None}
