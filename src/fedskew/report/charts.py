"""Charts as plain data for plotly.js: what to draw. The page adds fonts and colours for light and dark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.plot import MAX_CLIENTS
from fedskew.evaluation.figures import headline
from fedskew.experiment.run_directory import SavedRun
from fedskew.report.runs import Group

Chart = dict[str, Any]  # title, data and layout (as in plotly.js), height in pixels
# Tableau's ten: easy to tell apart on white and on black
COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
DASHES = ("solid", "dash", "dot")
BAND = "22"  # opacity of a band, as the last two digits of #rrggbbaa
CELLS = 40  # a heat map with more columns has no numbers in its cells


def make_chart(title: str, data: list[Any], height: int = 380, **layout: Any) -> Chart:
    """A chart of these traces; `layout` is plotly's."""
    return {"title": title, "data": data, "height": height, "layout": layout}


def colour(i: int) -> str:
    """The colour of the i-th series; they repeat after ten."""
    return COLOURS[i % len(COLOURS)]


def curves(group: Group) -> Chart:
    """Accuracy by round: for each method the mean over seeds, and a band of one standard deviation."""
    data: list[Any] = []
    for i, (name, runs) in enumerate(group.methods.items()):
        rounds, mean, std = over_seeds([accuracies(run) for run in runs])
        line = {"color": colour(i), "dash": DASHES[i // len(COLOURS) % len(DASHES)]}
        if any(std):
            data.append(band(rounds, mean, std, colour(i), name))
        mode = "lines+markers" if len(rounds) < 30 else "lines"
        data.append({"x": rounds, "y": mean, "name": name, "legendgroup": name, "mode": mode, "line": line})
    return make_chart("Accuracy by round (%)", data, 420, xaxis={"title": {"text": "round"}}, hovermode="x unified")


def band(rounds: list[int], mean: list[float], std: list[float], shade: str, name: str) -> Chart:
    """The area between mean - std and mean + std, as a trace."""
    above = [m + s for m, s in zip(mean, std, strict=True)]
    below = [m - s for m, s in zip(mean, std, strict=True)]
    look = {"fill": "toself", "fillcolor": shade + BAND, "line": {"width": 0}, "mode": "lines"}
    silent = {"hoverinfo": "skip", "showlegend": False, "legendgroup": name}
    return {"x": rounds + rounds[::-1], "y": above + below[::-1], **look, **silent}


def accuracies(run: SavedRun) -> dict[int, float]:
    """The run's headline accuracy in percent, by round (from 1), for the rounds that were evaluated."""
    values = {r.number: headline(r.metrics) for r in run.records}
    return {round: 100 * value for round, value in values.items() if value is not None}


def over_seeds(runs: Sequence[dict[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """(rounds, means, standard deviations), each over the runs that have that round; 0 for a single run."""
    rounds = sorted({round for run in runs for round in run})
    values = [[run[round] for run in runs if round in run] for round in rounds]
    return rounds, [statistics.mean(v) for v in values], [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]


def split(table: npt.NDArray[np.int64], labels: Sequence[str]) -> Chart:
    """Which client has which classes: a dot's area is the number of samples.

    `table` is [clients, classes]. With many clients only every n-th is drawn.
    """
    step = -(-len(table) // MAX_CLIENTS)
    client, label = np.nonzero(table[::step])
    counts = table[::step][client, label]
    most = max(4.0, min(34.0, 900 / max(len(table[::step]), 1)))
    hover = [f"client {c * step}, class {labels[int(k)]}: {n:,}" for c, k, n in zip(client, label, counts, strict=True)]
    look = {"color": colour(0), "line": {"width": 0}, "opacity": 0.8}
    area = {"size": counts.tolist(), "sizemode": "area", "sizeref": 2 * float(counts.max()) / most**2}
    where = {"x": (client * step).tolist(), "y": [labels[int(c)] for c in label]}
    dots = {**where, "mode": "markers", "marker": area | look, "text": hover, "hoverinfo": "text"}
    sampled = f" (one client in {step} is drawn)" if step > 1 else ""
    return make_chart(
        f"Samples by client and class{sampled}",
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
    shares: bool = True,
    x_title: str = "",
) -> Chart:
    """A heat map of values [y, x]; None leaves a gap. `shares`: values from 0 to 1, shown in percent."""
    shown = [[None if v is None else round(100 * v if shares else v, 3) for v in row] for row in values]
    cells: Chart = {"type": "heatmap", "x": list(x), "y": list(y), "z": shown, "colorscale": "Viridis"}
    cells |= {"hoverongaps": False, "hovertemplate": "%{y}, %{x}: %{z}<extra></extra>", "colorbar": {"thickness": 12}}
    if shares:
        cells |= {"zmin": 0, "zmax": 100} | ({"texttemplate": "%{z:.0f}"} if len(x) <= CELLS else {})
    axis = {"type": "category", "title": {"text": x_title, "standoff": 12}, "automargin": True}
    height = 150 + 30 * min(len(y), 25)
    return make_chart(title, [cells], height, xaxis=axis, yaxis={"type": "category", "autorange": "reversed"})


def bars(title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Chart:
    """Stacked bars, one per name; `parts` are the segments, by the name of the segment."""
    data = [
        {"type": "bar", "orientation": "h", "x": list(values), "y": list(names), "name": part}
        for part, values in parts.items()
    ]
    height = 140 + 34 * len(names)
    return make_chart(title, data, height, barmode="stack", yaxis={"autorange": "reversed", "type": "category"})


def cloud(title: str, points: npt.NDArray[np.float64], y: npt.NDArray[np.int64], labels: Sequence[str]) -> Chart:
    """Points [n, 2] with a colour per class `y`."""
    data = []
    for i, c in enumerate(np.unique(y)):
        mine = points[y == c].round(2)
        marker = {"size": 5, "color": colour(i), "symbol": i // len(COLOURS)}
        dots = {"x": mine[:, 0].tolist(), "y": mine[:, 1].tolist(), "name": labels[int(c)], "marker": marker}
        data.append({**dots, "mode": "markers", "type": "scatter", "hoverinfo": "name"})
    blank = {"showticklabels": False, "zeroline": False, "showgrid": False}
    return make_chart(title, data, 380, xaxis=blank, yaxis=blank)
