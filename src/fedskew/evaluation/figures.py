"""The vocabulary of figures: key, words, unit and direction of everything the project reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedskew.evaluation.metrics import Metrics

FIGURES = {  # what is tabled of a run: word -> where it stands in the last round's metrics
    "global": ("global", "accuracy"),
    "head": ("global", "head"),
    "middle": ("global", "middle"),
    "tail": ("global", "tail"),
    "ensemble": ("ensemble", "accuracy"),
    "clients": ("clients", "global", "mean"),
    "personal": ("clients", "personal", "mean"),
    "worst": ("clients", "personal", "worst_decile"),
    "new": ("new", "personal", "mean"),
}


def figure(metrics: Metrics | None, place: Sequence[str]) -> float | None:
    """One figure of an evaluation, by the keys that lead to it; None if there is none."""
    value: Any = metrics
    for key in place:
        value = None if value is None else getattr(value, "global_" if key == "global" else key)
    return None if value is None else float(value)


def headline(metrics: Metrics | None) -> float | None:
    """The one number of a run: the global model on the server's test set, else the mean over clients."""
    if metrics is None:
        return None
    if metrics.global_ is not None:
        return metrics.global_.accuracy
    clients = metrics.clients
    return (clients.global_ or clients.personal).mean if clients else None


class Round(Protocol):
    """What `to_target` reads of a record."""

    @property
    def round(self) -> int: ...
    @property
    def bytes_up(self) -> Mapping[str, int]: ...
    @property
    def bytes_down(self) -> Mapping[str, int]: ...
    @property
    def metrics(self) -> Metrics | None: ...


def to_target(records: Iterable[Round], target: float) -> dict[str, float | None]:
    """Rounds and bytes (both ways) until the headline first reaches a target."""
    spent = 0
    for record in records:
        spent += sum(record.bytes_up.values()) + sum(record.bytes_down.values())
        reached = headline(record.metrics)
        if reached is not None and reached >= target:
            return {"rounds": record.round + 1, "bytes": spent}
    return {"rounds": None, "bytes": None}


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def spread(mean: float | None, std: float | None) -> str:
    return percent(mean) if std is None else f"{percent(mean)} ±{100 * std:.2f}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
