"""A picture of a partition: dots (clients x classes, area ~ count) beside the clients' sizes, stacked by class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedskew.data.split.allotment import IntArray
from fedskew.data.split.partition import Partition
from fedskew.data.split.skew import MAX_CLIENTS, class_table

# Paul Tol's "muted" scheme: distinct to every kind of colour vision, also beside each other in a stack
MUTED = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
DOT = "#33558B"


def plot_partition(partition: Partition, y: npt.NDArray[Any], classes: int | None, path: str | Path) -> None:
    """Write a PNG of a partition to `path`.

    y: the labels of the pool.
    classes: how many classes to show; None: those that occur in y.
    Of more than 100 clients it shows every second, third, ..., and says so in the title.
    """
    table = class_table(partition, y, classes)
    N, C = table.shape
    step = -(-N // MAX_CLIENTS)
    shown = np.arange(0, N, step)
    figure = Figure(figsize=(13, np.clip(1.9 + 0.3 * C, 4.2, 7.5)), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    sampled = f" (drawn: {len(shown)} of them, one in {step})" if step > 1 else ""
    figure.suptitle(f"{N:,} clients{sampled}, {C} classes, {table.sum():,} samples", fontsize=12)
    dots, bars = figure.subplots(1, 2)
    names = [str(name) for name in (np.unique(y) if classes is None else range(classes))]
    _dots(figure, dots, table[shown], names)
    _bars(figure, bars, table[shown], names)
    for axes in (dots, bars):
        _clients(axes, shown)
    figure.savefig(path, format="png")


def _clients(axes: Axes, shown: IntArray) -> None:
    _label(axes.xaxis, [str(i) for i in shown])
    axes.set_xlim(-0.7, len(shown) - 0.3)
    axes.set_xlabel("client")
    axes.spines[["top", "right"]].set_visible(False)


def _dots(figure: Figure, axes: Axes, table: IntArray, names: list[str]) -> None:
    N, C = table.shape
    client, label = np.nonzero(table)
    counts = table[client, label]
    # The largest dot is two cells wide (a panel is about 400 x 300 points): large neighbours are rare and show through.
    area = np.clip(min(800 / N, 600 / C), 6, 24) ** 2 / table.max()
    look: dict[str, Any] = {"color": DOT, "alpha": 0.75, "linewidths": 0}
    axes.scatter(client, label, s=np.maximum(counts * area, 0.8), **look)
    axes.set_ylim(-0.7, C - 0.3)
    _label(axes.yaxis, names)
    axes.set_ylabel("class")
    keys = [axes.scatter([], [], s=k * area, label=f"{k:,}", **look) for k in _legend_counts(int(table.max()))]
    figure.legend(handles=keys, title="samples per dot", loc="outside lower left", ncols=len(keys), frameon=False)


def _legend_counts(largest: int) -> list[int]:
    """Up to three round counts: about a tenth, a third and all of the largest."""

    def rounded(x: float) -> int:
        power = 10 ** int(np.floor(np.log10(max(x, 1))))
        return int(max(1, x // power * power))

    return sorted({rounded(largest * share) for share in (0.1, 0.35, 1)})


def _bars(figure: Figure, axes: Axes, table: IntArray, names: list[str]) -> None:
    C = len(names)
    few = len(MUTED) >= C
    colours = ListedColormap(MUTED[:C]) if few else colormaps["viridis"].resampled(C)
    client, label = np.nonzero(table)
    top = table.cumsum(axis=1)[client, label]
    left, right, bottom = client - 0.43, client + 0.43, top - table[client, label]
    corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
    boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)  # [boxes, 4, 2]
    axes.add_collection(PolyCollection(list(boxes), facecolors=colours(label), linewidths=0))  # one artist, not N x C
    axes.set_ylim(0, 1.05 * table.sum(axis=1).max())
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if few:
        keys = [Patch(color=colours(c), label=name) for c, name in enumerate(names)]
        axes.legend(
            handles=keys, title="class", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True
        )
    else:
        shades = ScalarMappable(Normalize(-0.5, C - 0.5), colours)
        bar = figure.colorbar(shades, ax=axes, label="class", pad=0.02, aspect=40)
        _label(bar.ax.yaxis, names)


def _label(axis: Axis, names: list[str]) -> None:
    """Every name up to eleven, else about ten of them."""
    step = 1 if len(names) <= 11 else -(-len(names) // 10)
    axis.set_ticks(range(0, len(names), step), names[::step])
