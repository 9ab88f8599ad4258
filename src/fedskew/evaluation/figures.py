"""The vocabulary of figures: key, words, unit and direction of everything the project reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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


def figure(result: dict[str, Any], place: Sequence[str]) -> float | None:
    value: Any = result["metrics"]
    for key in place:
        value = value.get(key) if value else None
    return None if value is None else float(value)


def headline(metrics: dict[str, Any]) -> float | None:
    """The one number of a run: the global model on the balanced test set, else the mean personal accuracy."""
    if metrics.get("global"):
        return float(metrics["global"]["accuracy"])
    clients = metrics.get("clients")
    return float((clients["global"] or clients["personal"])["mean"]) if clients else None


def to_target(records: Iterable[dict[str, Any]], target: float) -> dict[str, float | None]:
    """Rounds and bytes (both ways) until the global model, or else the mean personal one, first reaches a target."""
    spent = 0
    for record in records:
        spent += sum(record["bytes_up"].values()) + sum(record["bytes_down"].values())
        reached = headline(record.get("metrics") or {})
        if reached is not None and reached >= target:
            return {"rounds": record["round"] + 1, "bytes": spent}
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
