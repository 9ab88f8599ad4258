"""Charts as plain data: what to draw. charts.js draws it, page.css has the colours for light and dark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.skew import MAX_CLIENTS
from fedskew.evaluation.figures import Figure
from fedskew.evaluation.metrics import Metrics
from fedskew.experiment.run_directory import SavedRun
from fedskew.report.runs import Group

Chart = dict[str, Any]  # kind, title, and what charts.js says of that kind
Read = Callable[[Metrics], float | None]
Values = Mapping[str, Sequence[Mapping[int, float]]]  # method -> a figure by round (from 1) of each of its runs
Views = Sequence[tuple[str, Values]]  # (name, what it shows)
MAX_POINTS = 400  # rounds of a curve; of longer ones every n-th round is drawn
SPLIT_TITLE = "Who has what: training samples by client and class"
MAX_BY_CLASS = 30_000  # points of all curves by class together


def curves(group: Group, figures: Sequence[tuple[str, Figure]], names: Sequence[str], unit: str = "%") -> Chart:
    """Figures by round: for each method the mean over seeds and a band of one standard deviation.

    `figures` are (name of the view, figure); those that no run has are left out. The last view is the accuracy of one
    class, by the classes' names.
    """
    scale = 100 if unit == "%" else 1

    def values(read: Read) -> Values:
        return {name: [by_round(run, read, scale) for run in runs] for name, runs in group.methods.items()}

    views = [(name, values(figure.of)) for name, figure in figures]
    return lines("By round", views, [(name, values(recall(c))) for c, name in enumerate(names)], unit)


def lines(title: str, views: Views, by_class: Views = (), unit: str = "%", most: int = MAX_POINTS) -> Chart:
    """Curves by round, one view per (name, values); those without values are left out. See `curves`.

    `by_class` become one view with a menu. A curve has at most `most` points.
    """
    made = [{"name": name, "series": _series(values, most)} for name, values in views]
    classes = [{"name": name, "series": _series(values, most)} for name, values in by_class]
    made = [view for view in made if view["series"]]
    if sum(len(s["points"]) for one in classes for s in one["series"]) <= MAX_BY_CLASS:
        classes = [one for one in classes if one["series"]]
        made += [{"name": "one class", "choices": classes}] if classes else []
    several = any(len(runs) > 1 for _, values in views for runs in values.values())
    note = "mean over seeds; bands: one standard deviation" if several else ""
    return {"kind": "lines", "title": title, "x": "round", "unit": unit, "views": made, "note": note}


def recall(c: int) -> Read:
    """The accuracy of class `c`, of the model that a run is judged by (see `Metrics.leading`)."""
    return lambda metrics: metrics.leading.per_class[c] if metrics.leading and metrics.leading.per_class else None


def _series(values: Values, most: int) -> list[Any]:
    """One curve per method that has values: [round, mean, standard deviation]."""
    series = []
    for i, (name, runs) in enumerate(values.items()):
        rounds, mean, std = over_seeds(runs)
        step = -(-len(rounds) // most) or 1
        points = [[r, round(m, 3), round(s, 3)] for r, m, s in zip(rounds, mean, std, strict=True)]
        if points:
            kept = points[::-step][::-1]  # the last round is always drawn
            series.append({"name": name, "colour": i, "points": kept})
    return series


def by_round(run: SavedRun, read: Read, scale: float = 100) -> dict[int, float]:
    """A figure of a run by round (from 1), for the rounds that were evaluated and have it."""
    values = {r.number: read(r.metrics) for r in run.records if r.metrics is not None}
    return {round: scale * value for round, value in values.items() if value is not None}


def over_seeds(runs: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """(rounds, means, standard deviations), each over the runs that have that round; 0 for a single run."""
    rounds = sorted({round for run in runs for round in run})
    values = [[run[round] for run in runs if round in run] for round in rounds]
    means = [statistics.fmean(v) for v in values]
    squares = [sum((one - m) ** 2 for one in v) / max(1, len(v) - 1) for v, m in zip(values, means, strict=True)]
    return rounds, means, [math.sqrt(square) for square in squares]


def split(table: npt.NDArray[np.int64], labels: Sequence[str], clients: Sequence[str]) -> Chart:
    """Which client has which classes: a dot's area is the number of samples.

    `table` is [clients, classes]; `labels` and `clients` are their names. With many clients only every n-th is drawn.
    """
    step = -(-len(table) // MAX_CLIENTS)
    client, label = np.nonzero(table[::step])
    counts = table[::step][client, label]
    return dots(np.stack([client, label, counts], 1).tolist(), labels, list(clients)[::step], step)


def dots(points: Sequence[Sequence[int]], labels: Sequence[str], clients: Sequence[str], step: int) -> Chart:
    """Samples as (place in `clients`, class, samples), where `clients` are the names of every `step`-th client."""
    sampled = f" (one client in {step} is drawn)" if step > 1 else ""
    return {
        "kind": "dots",
        "title": f"{SPLIT_TITLE}{sampled}",
        "columns": list(clients),
        "rows": list(labels),
        "x": "client",
        "y": "class",
        "one": "client",
        "points": list(points),
    }


def heat(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    x: str = "",
    y: str = "",
    high: float | None = None,
) -> Chart:
    """A heat map of values [rows, columns]; None leaves a gap.

    `high` is the end of a colour scale from 0; None: values are shares from 0 to 1, shown in percent.
    """
    scale, digits = (100, 0) if high is None else (1, 2)
    shown = [[None if v is None else round(scale * v, 3) for v in row] for row in values]
    about = {"low": 0, "high": 100 if high is None else high, "unit": "%" if high is None else "", "digits": digits}
    axes = {"columns": list(columns), "rows": list(rows), "x": x, "y": y}
    return {"kind": "heat", "title": title, **axes, **about, "views": [{"values": shown}]}


def confusion(tables: Mapping[str, npt.NDArray[np.int64]], names: Sequence[str]) -> Chart:
    """Confusion matrices, one view per method: what share of each class is predicted as what."""
    views = []
    for name, counts in tables.items():
        total = counts.sum(axis=1, keepdims=True)
        shares = np.round(100 * counts / np.maximum(total, 1), 1)
        rows = [row if n else [None] * len(names) for row, n in zip(shares.tolist(), total[:, 0], strict=True)]
        views.append({"name": name, "values": rows, "counts": counts.tolist()})
    axes = {"columns": list(names), "rows": list(names), "x": "predicted class", "y": "true class"}
    about = {"low": 0, "high": 100, "unit": "%", "digits": 0}
    return {
        "kind": "heat",
        "title": "Confusion: share of each class by prediction (%)",
        **axes,
        **about,
        "views": views,
    }


def bars(title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> Chart:
    """Stacked bars, one per name; `parts` are the segments, by the name of the segment."""
    return {"kind": "bars", "title": title, "names": list(names), "parts": {k: list(v) for k, v in parts.items()}} | {
        "unit": unit
    }


def cloud(title: str, points: npt.NDArray[np.float64], y: npt.NDArray[np.int64], labels: Sequence[str]) -> Chart:
    """Points [n, 2] with a colour per class `y`."""
    rows = [[*map(float, point), int(c)] for point, c in zip(points.round(1), y, strict=True)]
    return {"kind": "points", "title": title, "labels": list(labels), "points": rows}
