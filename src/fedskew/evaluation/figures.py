"""Every figure the project reports: its key, its words, its unit, whether higher is better, and where to read it.

The console, comparisons, published tables, the HTML report and the trackers all read this module, so a figure has one
name everywhere. A key is what JSON files, recipes and CSV headers use; keys do not change.

Accuracies are stored as shares from 0 to 1 and shown in percent. They are those of the last evaluated round, never
a maximum over test rounds. `fedskew.evaluation.metrics` documents the metrics they are read from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fedskew.evaluation.metrics import Metrics

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Figure:
    """One number of a finished run, or of several runs."""

    key: str  # its name in JSON, recipes and CSV
    words: str  # its name for people
    unit: str  # "%", "bytes", "s", "rounds", "M" (millions), "clients", or "" for a plain number
    better: Better
    place: tuple[str, ...] = ()  # the keys that lead to it in a run's result; () if it has to be computed

    def read(self, result: object) -> float | None:
        """The figure's value in a run's result (or a record that was evaluated); None if the run has none.

        >>> from types import SimpleNamespace
        >>> from fedskew.evaluation.metrics import ModelMetrics
        >>> shared = ModelMetrics(accuracy=0.9, loss=0.3, per_class=[0.9])
        >>> result = SimpleNamespace(metrics=Metrics(global_=shared))
        >>> FIGURES["global"].read(result), FIGURES["personal"].read(result)
        (0.9, None)
        """
        value: Any = result
        for key in self.place:
            value = None if value is None else getattr(value, "global_" if key == "global" else key)
        return None if value is None else float(value)

    def text(self, value: float | None, std: float | None = None) -> str:
        """The value as people read it, "-" for None. `std` is shown for accuracies only.

        >>> FIGURES["global"].text(0.9, 0.012), FIGURES["bytes"].text(1234), FIGURES["client_seconds"].text(2)
        ('90.00 ±1.20', '1.2 kB', '2.0')
        """
        if value is None:
            return "-"
        if self.unit == "%":
            return mean_and_std(value, std)
        if self.unit == "bytes":
            return bytes_text(value)
        return f"{value:.1f}" if self.unit == "s" else f"{value:.4g}" if self.unit == "" else f"{value:g}"


def _by_key(*figures: Figure) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def _accuracy(key: str, words: str, *place: str) -> Figure:
    return Figure(key, words, "%", "higher", ("metrics", *place))


# the accuracies that comparisons, tables and reports show, in this order
ACCURACIES = _by_key(
    _accuracy("global", "global model, balanced test set", "global", "accuracy"),
    _accuracy("head", "global model, head classes (most frequent third)", "global", "head"),
    _accuracy("middle", "global model, middle classes", "global", "middle"),
    _accuracy("tail", "global model, tail classes (rarest third)", "global", "tail"),
    _accuracy("ensemble", "ensemble at the server, balanced test set", "ensemble", "accuracy"),
    _accuracy("clients", "global model, clients' test parts: mean", "clients", "global", "mean"),
    _accuracy("personal", "personal models, clients' test parts: mean", "clients", "personal", "mean"),
    _accuracy("worst", "personal models, clients' test parts: worst tenth", "clients", "personal", "worst_decile"),
    _accuracy("new", "personal models, new clients' test parts: mean", "new", "personal", "mean"),
)
# further accuracies over clients that the console shows after a single run
OVER_CLIENTS = _by_key(
    ACCURACIES["clients"],
    _accuracy("clients_worst", "global model, clients' test parts: worst tenth", "clients", "global", "worst_decile"),
    ACCURACIES["personal"],
    ACCURACIES["worst"],
    _accuracy("new_global", "global model, new clients' test parts: mean", "new", "global", "mean"),
    _accuracy(
        "new_global_worst", "global model, new clients' test parts: worst tenth", "new", "global", "worst_decile"
    ),
    ACCURACIES["new"],
    _accuracy("new_worst", "personal models, new clients' test parts: worst tenth", "new", "personal", "worst_decile"),
)
# what `evaluation.diagnose` adds to a run's result
DIAGNOSTICS = _by_key(
    Figure("eigenvalue_spread", "eigenvalue spread", "", "lower", ("diagnostics", "eigenvalue_spread")),
    Figure("head_distance", "mean distance of clients' heads", "", "lower", ("diagnostics", "head_distance")),
)
# what a run costs: totals in a result, one round's share in a record (see `round_costs`)
COSTS = _by_key(
    Figure("bytes_up", "bytes up", "bytes", "lower", ("bytes_up",)),
    Figure("bytes_down", "bytes down", "bytes", "lower", ("bytes_down",)),
    Figure("client_seconds", "client seconds", "s", "lower", ("client_seconds",)),
    Figure("server_seconds", "server seconds", "s", "lower", ("server_seconds",)),
    Figure("seconds", "wall-clock seconds", "s", "lower", ("seconds",)),
    Figure("lost", "lost updates", "clients", "lower", ("lost",)),
)
# computed from a run's records, or from two runs
COMPUTED = _by_key(
    Figure("rounds_to_baseline", "rounds to the baseline's final accuracy", "rounds", "lower"),
    Figure("parameters", "numbers a client sends in the last round", "M", "lower"),
    Figure("round_seconds", "seconds per round", "s", "lower"),
)
# what a comparison says about cost, beside the accuracies
COMPARED = _by_key(
    Figure("rounds_to_target", "rounds to target", "rounds", "lower"),
    Figure("bytes_to_target", "bytes to target", "bytes", "lower"),
    Figure("bytes", "bytes up and down", "bytes", "lower"),
    COSTS["client_seconds"],
    COSTS["server_seconds"],
)
FIGURES = ACCURACIES | OVER_CLIENTS | DIAGNOSTICS | COSTS | COMPUTED | COMPARED


def headline(metrics: Metrics | None) -> float | None:
    """The accuracy that stands for a run: the global model's on the balanced test set.

    Without a global model or test set, the mean over clients on their own test parts. None if nothing was evaluated.
    """
    if metrics is None:
        return None
    if metrics.global_ is not None:
        return metrics.global_.accuracy
    clients = metrics.clients
    return (clients.global_ or clients.personal).mean if clients else None


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


def to_target(records: Iterable[Round], target: float) -> dict[str, float | None]:
    """Rounds and bytes (up and down) until `headline` first reaches `target`, a share from 0 to 1.

    Both are None if no evaluated round reaches it.
    """
    spent = 0
    for record in records:
        spent += sum(record.bytes_up.values()) + sum(record.bytes_down.values())
        reached = headline(record.metrics)
        if reached is not None and reached >= target:
            return {"rounds": record.round + 1, "bytes": spent}
    return {"rounds": None, "bytes": None}


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent with two decimals, without the sign: 0.5 gives "50.00", None gives "-"."""
    return "-" if share is None else f"{100 * share:.2f}"


def mean_and_std(mean: float | None, std: float | None) -> str:
    """`percent` of a mean over seeds, with "±" and the standard deviation unless that is None (one seed)."""
    return percent(mean) if std is None else f"{percent(mean)} ±{100 * std:.2f}"


def bytes_text(count: float) -> str:
    """A number of bytes with a decimal unit: 999 gives "999 B", 66 300 000 gives "66.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
