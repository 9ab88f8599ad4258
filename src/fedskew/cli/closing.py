"""The closing table of a run: its figures, what to be careful about, costs and digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedskew.cli.console import make_table
from fedskew.evaluation.cautions import cautions
from fedskew.evaluation.figures import (
    ACCURACIES,
    DIAGNOSTICS,
    FIGURES,
    MODELS,
    OVER_CLIENTS,
    Figure,
    bytes_text,
    percent,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedskew.evaluation.metrics import Metrics, Population
    from fedskew.experiment.result import Result

UNEVEN = 2  # clients' pooled test parts are never quite balanced: more figures if a class has twice another's samples
NAMED = 20  # clients with names that get a line each


def print_result(
    result: Result, reached: dict[str, Any], path: Path | None, screen: Console, names: Sequence[str] = ()
) -> None:
    """The final figures as a table, then warnings, costs, diagnostics and digests.

    `reached` says when the target was reached (empty: no target), `path` is the run's directory, `names` are the
    classes' names.
    """
    screen.print()
    title = f"{result.method}, {result.rounds} rounds, seed {result.seed}" + (", diverged" if result.diverged else "")
    rows = figure_rows(result)
    header = "accuracy" if all(figure.measure == "accuracy" for figure, _, _ in rows) else "figure"
    screen.print(make_table(title, [header, "%"], [(words, percent(value)) for _, words, value in rows]))
    if 1 < len(result.sites) <= NAMED and result.clients:
        columns = ["client", "test samples", "accuracy", "balanced accuracy", "macro F1", "AUROC"]
        screen.print()
        screen.print(make_table("each client's own test part, in %", columns, client_rows(result)))
    for caution in cautions(result.metrics, names):
        screen.print(caution)
    sent = f"{bytes_text(result.bytes_up)} up, {bytes_text(result.bytes_down)} down"
    screen.print(
        f"\n{sent}; clients {result.client_seconds:.1f} s, server {result.server_seconds:.1f} s, "
        f"total {result.seconds:.1f} s"
    )
    if result.epsilon is not None:
        screen.print(privacy_text(result))
    if result.left_out is not None:
        screen.print(f"robust aggregation left out {percent(result.left_out)} % of clients a round")
    if result.diagnostics is not None:
        found = [f"{figure.words} {figure.text(figure.read(result))}" for figure in DIAGNOSTICS.values()]
        screen.print(f"{', '.join(found)} ({result.diagnostics.clients} clients)")
    if result.metrics is not None and result.metrics.own is not None:
        screen.print(f"{result.settings['evaluation'].get('metric')} {FIGURES['own'].text(result.metrics.own)}")
    if reached:
        how = f"{reached['rounds']} rounds, {bytes_text(reached['bytes'])}" if reached["rounds"] else "not reached"
        figure = FIGURES.get(reached["figure"])
        what = f"{figure.measure} of {reached['target']:g} {figure.unit}".rstrip() if figure else "target"
        screen.print(f"to {what}: {how}")
    screen.print(f"digest {result.digest[:16]}, model_digest {result.model_digest[:16]}")
    screen.print(f"saved in {path}")


def privacy_text(result: Result) -> str:
    """What a run with differential privacy spent, in one line."""
    table = result.settings["privacy"]
    return (
        f"differential privacy of clients: epsilon {result.epsilon:.3g} at delta {table['delta']:g}, clip "
        f"{table['clip']:g}; it covers the model, not the figures above"
    )


IMBALANCED = ("balanced", "f1", "auroc")  # shown before accuracies where these may mislead


def client_rows(result: Result) -> list[list[str]]:
    """The figures of each named client: of the global model, or of its own if there is no global one.

    Where a client's test samples are all of one class, a model that always says this class would be called perfect:
    figures that should tell classes apart are left out.
    """
    rows = []
    for number, row in result.clients.items():
        found = row.global_ or row.personal
        several = sum(recall is not None for recall in found.per_class) > 1
        values = [found.accuracy, *([found.balanced_accuracy, found.macro_f1] if several else [None] * 2), found.auroc]
        rows.append([result.sites[int(number)], str(row.samples), *map(percent, values)])
    return rows


def figure_rows(result: Result) -> list[tuple[Figure, str, float]]:
    """The figures of the closing table, as (figure, words, value), the leading one first.

    Where classes have about equally many samples and are more than two, accuracies are enough. Personal models that
    are the global model are left out.
    """
    metrics = result.metrics
    rows = [*_more_rows(metrics, ""), *((ACCURACIES[key], "") for key in ACCURACIES if key not in OVER_CLIENTS)]
    for start in ("clients_", "personal_", "new_global_", "new_"):
        _, place = MODELS[start]
        group: Population | None = getattr(metrics, place[0], None)
        scores = None if group is None else group.personal if place[1] == "personal" else group.global_
        if group is None or scores is None or (place[1] == "personal" and scores == group.global_):
            continue
        rows += _more_rows(metrics, start)
        rows += [(f, f" of {scores.clients} clients") for f in OVER_CLIENTS.values() if f.place[1:3] == place]
    mixed = any(figure.measure != "accuracy" for figure, _ in rows)
    found = []
    for figure, end in rows:
        value, words = figure.read(result), figure.name(metrics) + end
        if value is not None:
            found.append((figure, f"{words}: accuracy" if mixed and figure.measure == "accuracy" else words, value))
    return found


def _more_rows(metrics: Metrics | None, start: str) -> list[tuple[Figure, str]]:
    """Balanced accuracy, F1 and AUROC of one of `MODELS` (a start of keys), where its accuracy may mislead."""
    detail: Any = metrics
    for key in MODELS[start][1]:
        detail = getattr(detail, "global_" if key == "global" else key, None)
    if detail is None or sum(count > 0 for count in detail.samples) < 2:  # of one class anything looks perfect
        return []
    uneven = max(detail.samples) >= UNEVEN * min(detail.samples) or (not start and not detail.balanced)
    if not uneven and len(detail.per_class) > 2:
        return []
    return [(FIGURES[start + key], "") for key in IMBALANCED]
