"""Charts as plain data, in the form plotly.js takes: what to draw, not in which colours the page is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.plot import MAX_CLIENTS
from fedskew.evaluation.figures import headline
from fedskew.report.runs import Group, Kept

Figure = dict[str, Any]
# Tableau's ten: apart from each other on white and on black
COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
DASHES = ("solid", "dash", "dot")
BAND = "22"  # of 255: how much of a band's colour shows
CELLS = 40  # rows or columns of a map up to which every value is written in it


def figure(title: str, data: list[Any], height: int = 380, **layout: Any) -> Figure:
    return {"title": title, "data": data, "height": height, "layout": layout}


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def curves(group: Group) -> Figure:
    """Accuracy by round: the mean over seeds, and a band of one standard deviation."""
    data: list[Any] = []
    for i, (name, runs) in enumerate(group.methods.items()):
        rounds, mean, spread = over_seeds([accuracies(run) for run in runs])
        line = {"color": colour(i), "dash": DASHES[i // len(COLOURS) % len(DASHES)]}
        if any(spread):
            data.append(band(rounds, mean, spread, colour(i), name))
        mode = "lines+markers" if len(rounds) < 30 else "lines"
        data.append({"x": rounds, "y": mean, "name": name, "legendgroup": name, "mode": mode, "line": line})
    return figure("Accuracy by round (%)", data, 420, xaxis={"title": {"text": "round"}}, hovermode="x unified")


def band(rounds: list[int], mean: list[float], spread: list[float], shade: str, name: str) -> Figure:
    above = [m + s for m, s in zip(mean, spread, strict=True)]
    below = [m - s for m, s in zip(mean, spread, strict=True)]
    look = {"fill": "toself", "fillcolor": shade + BAND, "line": {"width": 0}, "mode": "lines"}
    silent = {"hoverinfo": "skip", "showlegend": False, "legendgroup": name}
    return {"x": rounds + rounds[::-1], "y": above + below[::-1], **look, **silent}


def accuracies(run: Kept) -> dict[int, float]:
    seen = {r["round"] + 1: headline(r["metrics"] or {}) for r in run.records}
    return {round: 100 * value for round, value in seen.items() if value is not None}


def over_seeds(runs: Sequence[dict[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """(rounds, mean, standard deviation) over the runs that have that round."""
    rounds = sorted({round for run in runs for round in run})
    values = [[run[round] for run in runs if round in run] for round in rounds]
    return rounds, [statistics.mean(v) for v in values], [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]


def split(table: npt.NDArray[np.int64], labels: Sequence[str]) -> Figure:
    """Clients by classes: a dot's area is the number of samples."""
    step = -(-len(table) // MAX_CLIENTS)
    client, label = np.nonzero(table[::step])
    counts = table[::step][client, label]
    most = max(4.0, min(34.0, 900 / max(len(table[::step]), 1)))
    said = [f"client {c * step}, class {labels[int(k)]}: {n:,}" for c, k, n in zip(client, label, counts, strict=True)]
    look = {"color": colour(0), "line": {"width": 0}, "opacity": 0.8}
    area = {"size": counts.tolist(), "sizemode": "area", "sizeref": 2 * float(counts.max()) / most**2}
    where = {"x": (client * step).tolist(), "y": [labels[int(c)] for c in label]}
    dots = {**where, "mode": "markers", "marker": area | look, "text": said, "hoverinfo": "text"}
    sampled = f" (one client in {step} is drawn)" if step > 1 else ""
    return figure(
        f"Who has what: samples by client and class{sampled}",
        [dots],
        height=160 + 22 * min(len(labels), 30),
        xaxis={"title": {"text": "client"}},
        yaxis={"type": "category", "categoryarray": list(labels), "categoryorder": "array"},
    )


def heat(
    title: str,
    x: Sequence[str],
    y: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    percent: bool = True,
    x_title: str = "",
) -> Figure:
    shown = [[None if v is None else round(100 * v if percent else v, 3) for v in row] for row in values]
    cells: Figure = {"type": "heatmap", "x": list(x), "y": list(y), "z": shown, "colorscale": "Viridis"}
    cells |= {"hoverongaps": False, "hovertemplate": "%{y}, %{x}: %{z}<extra></extra>", "colorbar": {"thickness": 12}}
    if percent:
        cells |= {"zmin": 0, "zmax": 100} | ({"texttemplate": "%{z:.0f}"} if len(x) <= CELLS else {})
    axis = {"type": "category", "title": {"text": x_title, "standoff": 12}, "automargin": True}
    height = 150 + 30 * min(len(y), 25)
    return figure(title, [cells], height, xaxis=axis, yaxis={"type": "category", "autorange": "reversed"})


def bars(title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Figure:
    data = [
        {"type": "bar", "orientation": "h", "x": list(values), "y": list(names), "name": part}
        for part, values in parts.items()
    ]
    height = 140 + 34 * len(names)
    return figure(title, data, height, barmode="stack", yaxis={"autorange": "reversed", "type": "category"})


def cloud(title: str, points: npt.NDArray[np.float64], y: npt.NDArray[np.int64], labels: Sequence[str]) -> Figure:
    """Features in the plane, a colour a class."""
    data = []
    for i, c in enumerate(np.unique(y)):
        mine = points[y == c].round(2)
        marker = {"size": 5, "color": colour(i), "symbol": i // len(COLOURS)}
        dots = {"x": mine[:, 0].tolist(), "y": mine[:, 1].tolist(), "name": labels[int(c)], "marker": marker}
        data.append({**dots, "mode": "markers", "type": "scatter", "hoverinfo": "name"})
    blank = {"showticklabels": False, "zeroline": False, "showgrid": False}
    return figure(title, data, 380, xaxis=blank, yaxis=blank)
