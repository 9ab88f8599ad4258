"""Every figure the project reports: its key, its words, its unit, whether higher is better, and where to read it.

The console, comparisons, published tables, the HTML report and the trackers all read this module, so a figure has one
name everywhere. A key is what JSON files, recipes and CSV headers use; keys do not change.

Accuracies and the like are stored as shares from 0 to 1 and shown in percent. They are those of the last evaluated
round, never a maximum over test rounds. `fedskew.evaluation.metrics` documents the metrics they are read from.

One figure leads: it stands for a run in progress lines, verdicts and targets. That is the accuracy of the global model
on the server's test set if that set is balanced (its largest class has at most 1.3 times the samples of its smallest),
and its balanced accuracy if not. See `leading_figure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fedskew.core.settings import UsageError, unknown
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
    measure: str = ""  # what is measured, without saying of which model: "accuracy", "macro F1"; "": not of a model

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

    def of(self, metrics: Metrics | None) -> float | None:
        """The figure's value in one evaluation; None if it has none."""
        return self.read(_Evaluated(metrics))

    def name(self, metrics: Metrics | None) -> str:
        """The figure's words, which call a test set balanced only where it is.

        >>> from fedskew.evaluation.metrics import ModelMetrics
        >>> shared = ModelMetrics(accuracy=0.9, loss=0.3, per_class=[0.9, 0.9], samples=[5, 5], predicted=[5, 5])
        >>> FIGURES["global"].name(Metrics(global_=shared)), FIGURES["global"].name(None)
        ('global model, balanced test set', 'global model, test set')
        """
        found = None if metrics is None else metrics.global_ or metrics.ensemble
        return self.words.replace(" test set", " balanced test set") if found and found.balanced else self.words

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


class _Evaluated(NamedTuple):
    metrics: Metrics | None


def _by_key(*figures: Figure) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def _accuracy(key: str, words: str, *place: str) -> Figure:
    return Figure(key, words, "%", "higher", ("metrics", *place), "accuracy")


# the accuracies that comparisons, tables and reports show, in this order
ACCURACIES = _by_key(
    _accuracy("global", "global model, test set", "global", "accuracy"),
    _accuracy("head", "global model, head classes (most frequent third)", "global", "head"),
    _accuracy("middle", "global model, middle classes", "global", "middle"),
    _accuracy("tail", "global model, tail classes (rarest third)", "global", "tail"),
    _accuracy("ensemble", "ensemble at the server, test set", "ensemble", "accuracy"),
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


@dataclass(frozen=True)
class Measure:
    """What can be said about predictions, besides accuracy. A figure is a measure of one model on certain samples."""

    key: str
    words: str
    field: str  # of `metrics.Detail`
    better: Better = "higher"
    unit: str = "%"


MEASURES = {
    measure.key: measure
    for measure in (
        Measure("balanced", "balanced accuracy", "balanced_accuracy"),
        Measure("f1", "macro F1", "macro_f1"),
        Measure("weighted_f1", "weighted F1", "weighted_f1"),
        Measure("auroc", "AUROC", "auroc"),
        Measure("auprc", "AUPRC", "auprc"),
        Measure("ece", "expected calibration error", "ece", "lower"),
        Measure("loss", "loss", "loss", "lower", ""),
    )
}
# the models that measures are taken of: start of the key, words, where the metrics are
MODELS = {
    "": ("global model, test set", ("global",)),
    "ensemble_": ("ensemble at the server, test set", ("ensemble",)),
    "clients_": ("global model, clients' test parts", ("clients", "global")),
    "personal_": ("personal models, clients' test parts", ("clients", "personal")),
    "new_global_": ("global model, new clients' test parts", ("new", "global")),
    "new_": ("personal models, new clients' test parts", ("new", "personal")),
}


def _measured() -> Iterator[Figure]:
    """Every measure of every model. Over clients: of the pooled predictions, the clients' mean, and the worst tenth."""
    for start, (words, place) in MODELS.items():
        over_clients = len(place) == 2
        for m in MEASURES.values():
            pooled = f"{words}: {m.words}" + (", pooled" if over_clients else "")
            yield Figure(start + m.key, pooled, m.unit, m.better, ("metrics", *place, m.field), m.words)
            if over_clients and m.key in ("balanced", "f1", "auroc"):
                over = ("metrics", *place, "over", m.field)
                mean, worst = f"{words}: {m.words}, mean of clients", f"{words}: {m.words}, worst tenth of clients"
                yield Figure(f"{start}{m.key}_mean", mean, m.unit, m.better, (*over, "mean"), m.words)
                yield Figure(f"{start}{m.key}_worst", worst, m.unit, m.better, (*over, "worst_decile"), m.words)


# balanced accuracy, F1, areas under curves, calibration and loss, of every model: `f1`, `personal_auroc`, ...
MEASURED = _by_key(
    *_measured(),
    Figure("own", "global model, test set: your own figure", "", "higher", ("metrics", "own"), "own figure"),
)
# what `evaluation.diagnose` adds to a run's result
DIAGNOSTICS = _by_key(
    Figure("eigenvalue_spread", "eigenvalue spread", "", "lower", ("diagnostics", "eigenvalue_spread")),
    Figure("head_distance", "mean distance of clients' heads", "", "lower", ("diagnostics", "head_distance")),
)
# what a run costs: totals in a result, one round's share in a record (see rounds.py)
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
FIGURES = ACCURACIES | OVER_CLIENTS | MEASURED | DIAGNOSTICS | COSTS | COMPUTED | COMPARED


def leading_figure(metrics: Metrics | None, goal: str | None = None) -> Figure | None:
    """The figure that stands for a run; None if nothing was evaluated.

    It is of the global model on the server's test set; without these of the global model on the clients' test parts,
    and without a global model of the personal models. It is the accuracy (over clients, their mean) where the samples
    are balanced, and the balanced accuracy of the pooled predictions where they are not.

    `goal` asks for another one: a measure such as "f1" or "accuracy" (of the same model), or a key of `FIGURES`.
    """
    if metrics is None or metrics.leading is None:
        return None
    if metrics.global_ is not None:
        start, accuracy = "", "global"
    else:
        accuracy = "clients" if metrics.clients is not None and metrics.clients.global_ is not None else "personal"
        start = f"{accuracy}_"
    if goal == "accuracy" or (goal is None and metrics.leading.balanced is not False):
        return FIGURES[accuracy]
    if goal is None:
        return FIGURES[f"{start}balanced"]
    return FIGURES[start + goal if goal in MEASURES else goal]


def headline(metrics: Metrics | None, goal: str | None = None) -> float | None:
    """The value of `leading_figure`; None if nothing was evaluated."""
    figure = leading_figure(metrics, goal)
    return None if figure is None else figure.of(metrics)


def check_goal(text: str | None) -> str | None:
    """`text` if it names a measure or a figure of models; UsageError if not. None stays None."""
    known = {"accuracy", *MEASURES, *ACCURACIES, *OVER_CLIENTS, *MEASURED}
    if text is not None and text not in known:
        raise unknown("goal", text, known)
    return text


def goal_figure(goal: str) -> Figure:
    """A figure with the unit and direction of a goal that `check_goal` accepts."""
    return FIGURES["global" if goal == "accuracy" else goal]


def target_value(target: float, goal: str | None) -> float:
    """A target as people give it, in the unit that is printed (percent), as a figure's value: 80 gives 0.8.

    A target that cannot be meant is a `UsageError`: not a number, negative, above 100 %, or a share such as 0.8.
    """
    figure = goal_figure(goal or "accuracy")
    if figure.unit != "%":
        if not (math.isfinite(target) and target >= 0):
            raise UsageError(f"--target {target:g} is invalid: expected a number of at least 0.")
        return target
    if figure.better == "higher" and 0 < target <= 1:
        raise UsageError(f"--target {target:g} is invalid: figures are in percent; did you mean {100 * target:g}?")
    if not 0 < target <= 100:
        raise UsageError(f"--target {target:g} is invalid: expected a percentage above 0 and at most 100, such as 80.")
    return target / 100


def at_least_as_good(value: float, other: float, better: Better) -> bool:
    """Whether a value is not worse than another."""
    return value >= other if better == "higher" else value <= other


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
