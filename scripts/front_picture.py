"""The picture on the front page, from the board's evidence: what skew does to FedAvg, and what others win back.

python scripts/front_picture.py    writes docs/front-{light,dark}.svg, and docs/front-narrow-{light,dark}.svg for phones
python scripts/front_picture.py --counts    first writes results/front/counts.csv, who has what; needs Fashion-MNIST

Task t0 has no skew, t2 two of ten classes at each client; data, net and training are the same but for the cohort. On
both tuned FedAvg is flat at the end. The methods shown are those with the best means that need no public data: chosen
by a rule, not by hand.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedskew.methods import REGISTRY
from fedskew.studies.board.evidence import Row, Task, shipped

ROOT = Path(__file__).parents[1]
COUNTS = ROOT / "results" / "front" / "counts.csv"
EVEN, SKEWED = "t0", "t2"
SHOWN = 4  # methods beside FedAvg
WORST = "worst"  # key of the figure: a client's own model, mean of the worst tenth


class Look(NamedTuple):
    """Colours of one version of the picture."""

    ink: str
    faint: str
    plain: str  # FedAvg without skew, and training alone
    hurt: str  # FedAvg under skew, and its clients
    better: str  # a method


LOOKS = {
    "light": Look("#1f2328", "#8b949e", "#6e7781", "#c2410c", "#0969da"),
    "dark": Look("#e6edf3", "#7d8590", "#9198a1", "#f0883e", "#58a6ff"),
}


class Bar(NamedTuple):
    """One line of a chart, in %."""

    label: str
    mean: float
    seeds: list[float]  # one dot each; []: none
    role: str  # which colour it has


def tasks() -> tuple[Task, Task]:
    """The tasks without and with skew."""
    found = {task.name: task for task in shipped()}
    return found[EVEN], found[SKEWED]


def row_of(task: Task, method: str) -> Row:
    return next(row for row in task.rows if row.method == method)


def title(method: str) -> str:
    """A method as people write it."""
    return "FedAvg, fine-tuned" if method == "finetune" else REGISTRY[method.partition(":")[0]].__name__


def bar(row: Row, label: str, role: str, figure: str = "") -> Bar:
    """The task's own figure with its seeds, or the mean of another figure."""
    if figure:
        return Bar(label, 100 * (row.figures[figure] or 0.0), [], role)
    return Bar(label, 100 * (row.value or 0.0), [100 * value for value in row.values.values()], role)


def global_models() -> list[Bar]:
    """FedAvg without and with skew, and the methods with the best means, best last."""
    even, skewed = tasks()
    able = [r for r in skewed.rows if not (r.public or r.control or r.failed) and r.value is not None]
    best = sorted(able, key=lambda r: r.value or 0.0)[-SHOWN:]
    both = [bar(row_of(even, "fedavg"), "FedAvg, no skew", "plain"), bar(row_of(skewed, "fedavg"), "FedAvg", "hurt")]
    return both + [bar(row, title(row.method), "better") for row in best]


def own_models() -> list[Bar]:
    """The model that each client would use, on its own data: mean of the worst tenth of the clients."""
    even, skewed = tasks()
    able = [r for r in skewed.rows if not (r.public or r.control) and r.figures.get(WORST) and not r.failed]
    best = sorted(able, key=lambda r: r.figures[WORST] or 0.0)[-(SHOWN - 1) :]
    lines = [
        bar(row_of(even, "fedavg"), "FedAvg, no skew", "plain", WORST),
        bar(row_of(skewed, "fedavg"), "FedAvg", "hurt", WORST),
        bar(row_of(skewed, "local"), "no federation", "plain", WORST),
    ]
    return lines + [bar(row, title(row.method), "better", WORST) for row in best]


def write_counts() -> None:
    """Samples of each class at each client of the skewed task, seed 0."""
    from fedskew.data.sources.loading import load
    from fedskew.data.split.chain import make_partition

    labels = load("fmnist").y_train
    split = tasks()[1].settings["split"]
    clients = make_partition(split, labels, seed=0).clients
    COUNTS.parent.mkdir(parents=True, exist_ok=True)
    with COUNTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["client", *range(10)])
        writer.writerows([i, *np.bincount(labels[own], minlength=10)] for i, own in enumerate(clients))


def rows(axes: Axes, bars: list[Bar], look: Look, title: str) -> None:
    """A bar for the mean and a dot for each seed."""
    for place, one in enumerate(bars):
        colour = getattr(look, one.role)
        axes.barh(place, one.mean, height=0.62, color=colour, alpha=0.28, linewidth=0)
        axes.plot([one.mean, one.mean], [place - 0.31, place + 0.31], color=colour, linewidth=2.5)
        axes.scatter(one.seeds, [place] * len(one.seeds), s=14, color=colour, zorder=3)
        text = f"{one.mean:.0f} %"
        axes.annotate(text, (117, place), va="center", ha="right", color=colour, weight="bold", fontsize=9.5)
    axes.set_yticks(range(len(bars)), [one.label for one in bars], color=look.ink, fontsize=9.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_title(title, loc="left", color=look.ink, fontsize=10.5, weight="bold")


def mixes(axes: Axes, look: Look) -> None:
    """Dots for the classes of each client under the skewed split."""
    with COUNTS.open() as file:
        table = np.array([[int(row[str(c)]) for c in range(10)] for row in csv.DictReader(file)])
    client, cls = np.nonzero(table)
    axes.scatter(client, cls, s=table[client, cls] / 2.5, color=look.hurt, alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, len(table) - 0.2)
    axes.set_ylim(9.8, -0.8)
    axes.set_xticks(range(0, len(table), 2), [str(i) for i in range(0, len(table), 2)])
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
    rows(middle, global_models(), look, "Global model, all classes")
    rows(right, own_models(), look, "Own data, worst tenth of clients")
    for axes in (left, middle, right):
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=look.faint, length=0, labelsize=9)
        axes.grid(axis="both" if axes is left else "x", color=look.faint, alpha=0.2, linewidth=0.6)
        axes.set_axisbelow(True)
    for axes in (middle, right):
        axes.tick_params(axis="y", colors=look.ink)
        axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
    note = (
        "Fashion-MNIST, 3,000 images, 20 clients, 5 a round; learning rates chosen on validation data. "
        "Last round, dots are seeds."
    )
    figure.supxlabel(
        note.replace("; learning", ";\nlearning").replace("data. ", "data.\n") if narrow else note,
        fontsize=8.5,
        color=look.faint,
        x=0.01,
        ha="left",
    )
    with matplotlib.rc_context({"svg.hashsalt": "fedskew"}):
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    if "--counts" in sys.argv[1:]:
        write_counts()
    for name, colours in LOOKS.items():
        draw(colours, ROOT / "docs" / f"front-{name}.svg")
        draw(colours, ROOT / "docs" / f"front-narrow-{name}.svg", narrow=True)
