"""The picture on the front page, from results/baselines-fmnist: what skew does to FedAvg, and what others win back.

python scripts/front_picture.py    writes docs/front-{light,dark}.svg, and docs/front-narrow-{light,dark}.svg for phones
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "baselines-fmnist"
SEEDS = (0, 1, 2)


class Look(NamedTuple):
    """Colours of one version of the picture."""

    ink: str
    faint: str
    plain: str  # FedAvg without skew, and its clients
    hurt: str  # FedAvg under skew, and its clients
    better: str  # a method


LOOKS = {
    "light": Look("#1f2328", "#8b949e", "#6e7781", "#c2410c", "#0969da"),
    "dark": Look("#e6edf3", "#7d8590", "#9198a1", "#f0883e", "#58a6ff"),
}

# the label of a row, its runs, and which colour it has
GLOBAL = [
    ("FedAvg, no skew", "iid", "plain"),
    ("FedAvg", "fedavg", "hurt"),
    ("SCAFFOLD, by samples", "scaffold-weightingsamples", "better"),
    ("VHL", "vhl", "better"),
    ("CCVR", "ccvr", "better"),
    ("FedAvgM", "fedavgm", "better"),
]
OWN = [
    ("FedAvg, no skew", "iid", "plain"),
    ("FedAvg", "fedavg", "hurt"),
    ("FedAvgM", "fedavgm", "better"),
    ("no federation", "local", "plain"),
    ("Ditto", "ditto", "better"),
    ("FedAvg, fine-tuned", "finetune", "better"),
]


def last_rounds(figure: str) -> dict[str, list[float]]:
    """The figure in % after the last round, by method, one value per seed."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for name, prefix in (("curves.csv", ""), ("iid-curves.csv", "iid")):
        with (RESULTS / name).open() as file:
            for row in csv.DictReader(file):
                method, _, seed = row["run"].rpartition("-s")
                key = (prefix or method, int(seed))
                if row[figure] and int(row["round"]) >= found.get(key, (0, 0.0))[0]:
                    found[key] = (int(row["round"]), 100 * float(row[figure]))
    methods = {method for method, _ in found}
    return {method: [found[method, seed][1] for seed in SEEDS] for method in methods}


def rows(axes: Axes, values: dict[str, list[float]], shown: list[tuple[str, str, str]], look: Look, title: str) -> None:
    """A bar for the mean and a dot for each seed."""
    for place, (_, runs, role) in enumerate(shown):
        colour, mean = getattr(look, role), float(np.mean(values[runs]))
        axes.barh(place, mean, height=0.62, color=colour, alpha=0.28, linewidth=0)
        axes.plot([mean, mean], [place - 0.31, place + 0.31], color=colour, linewidth=2.5)
        axes.scatter(values[runs], [place] * len(SEEDS), s=14, color=colour, zorder=3)
        axes.annotate(f"{mean:.0f} %", (104, place), va="center", ha="right", color=colour, weight="bold", fontsize=9.5)
    axes.set_yticks(range(len(shown)), [label for label, _, _ in shown], color=look.ink, fontsize=9.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_title(title, loc="left", color=look.ink, fontsize=10.5, weight="bold")


def mixes(axes: Axes, look: Look) -> None:
    """Dots for the classes of each client under the skewed split."""
    with (RESULTS / "counts.csv").open() as file:
        table = np.array(
            [[int(row[str(c)]) for c in range(10)] for row in csv.DictReader(file) if row["split"] != "iid"]
        )
    client, cls = np.nonzero(table)
    axes.scatter(client, cls, s=table[client, cls] / 3.2, color=look.hurt, alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, 9.8)
    axes.set_ylim(9.8, -0.8)
    axes.set_xticks(range(10), [str(i) for i in range(10)])
    axes.set_yticks(range(10), [str(i) for i in range(10)])
    axes.set_xlabel("client", color=look.ink, fontsize=9)
    axes.set_ylabel("class", color=look.ink, fontsize=9)
    axes.set_title("Who has what", loc="left", color=look.ink, fontsize=10.5, weight="bold")


def draw(look: Look, path: Path, narrow: bool = False) -> None:
    """Three panels side by side, or `narrow`: below each other, so that a phone's screen can be read."""
    figure = Figure(figsize=(5, 9.3) if narrow else (11, 3.9), layout="constrained", facecolor="none")
    FigureCanvasSVG(figure)
    shape = {"height_ratios": [1.1, 1, 1]} if narrow else {"width_ratios": [0.8, 1, 1]}
    left, middle, right = figure.subplots(3, 1, **shape) if narrow else figure.subplots(1, 3, **shape)
    mixes(left, look)
    rows(middle, last_rounds("global"), GLOBAL, look, "Global model, all classes")
    rows(right, last_rounds("worst"), OWN, look, "Own data, worst tenth of clients")
    for axes in (left, middle, right):
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=look.faint, length=0, labelsize=9)
        axes.grid(axis="both" if axes is left else "x", color=look.faint, alpha=0.2, linewidth=0.6)
        axes.set_axisbelow(True)
    for axes in (middle, right):
        axes.tick_params(axis="y", colors=look.ink)
        axes.set_xticks([0, 25, 50, 75], ["0", "25", "50", "75 %"])
    note = (
        "Fashion-MNIST, 6,000 images, 10 clients, dirichlet 0.1, 20 rounds; last round, dots are seeds. "
        "Every method with its defaults, none tuned; FedAvg still climbs."
    )
    figure.supxlabel(
        note.replace("; last round", ";\nlast round").replace("seeds. ", "seeds.\n") if narrow else note,
        fontsize=8.5,
        color=look.faint,
        x=0.01,
        ha="left",
    )
    with matplotlib.rc_context({"svg.hashsalt": "fedskew"}):
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    for name, colours in LOOKS.items():
        draw(colours, ROOT / "docs" / f"front-{name}.svg")
        draw(colours, ROOT / "docs" / f"front-narrow-{name}.svg", narrow=True)
