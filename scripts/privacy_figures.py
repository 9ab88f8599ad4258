"""Tables and figures of docs/privacy.md, from the files that dp_study.py and robust_study.py write.

    python scripts/privacy_figures.py              draws docs/epsilon.svg and docs/robust.svg, prints the tables

A cell is the mean over seeds; those of epsilon have each seed in brackets. Figures have only cells of three seeds.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parents[1]
EPSILONS = ("none", "32.0", "8.0", "4.0", "2.0")
ATTACKS = (("none", 0), *((attack, count) for attack in ("signflip", "alie") for count in (2, 4, 6)))
RULES = [(rule, mixing) for rule in ("mean", "trimmed", "median", "geometric", "krum") for mixing in ("none", "nnm")]
FIGURES = {
    "accuracy": "accuracy",
    "worst_tenth": "worst tenth of clients",
    "honest_left_out": "honest clients left out",
}
SEEDS = 3
CLIENTS = 20
Rows = Sequence[Mapping[str, str]]


def read(name: str) -> list[dict[str, str]]:
    """The lines of a file in results/."""
    with (HERE / "results" / name).open() as file:
        return list(csv.DictReader(file))


def percents(rows: Rows, figure: str) -> list[float]:
    """A figure of some runs, in %."""
    return [100 * float(row[figure]) for row in rows]


def by(rows: Rows, *keys: str) -> dict[tuple[str, ...], list[Mapping[str, str]]]:
    """The rows by the values of these columns."""
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def table(head: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    columns = list(head)
    return "\n".join("|".join(["", *line, ""]) for line in [columns, ["---"] * len(columns), *lines])


def epsilon_cell(rows: Rows) -> str:
    """Mean and seeds, such as 81.1 (81.9, 80.3, 81.1)."""
    values = percents(sorted(rows, key=lambda row: int(row["seed"])), "accuracy")
    return f"{statistics.mean(values):.1f} ({', '.join(f'{v:.1f}' for v in values)})" if values else "-"


def epsilon_figures() -> None:
    rows = read("privacy/epsilon.csv")
    cells, methods = by(rows, "method", "epsilon"), list(dict.fromkeys(row["method"] for row in rows))
    head = ["method", "no privacy", "epsilon 32", "8", "4", "2"]
    print(table(head, [[m, *(epsilon_cell(cells[m, e]) for e in EPSILONS)] for m in methods]), "\n")
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for place, (method, marker) in enumerate(zip(methods, "osD^", strict=True)):
        known = [
            (x, percents(cells[method, e], "accuracy"))
            for x, e in enumerate(reversed(EPSILONS))
            if len(cells[method, e]) == SEEDS
        ]
        at = [x + 0.06 * (place - 1.5) for x, _ in known]
        means = [statistics.mean(values) for _, values in known]
        spread = [[m - min(v) for m, (_, v) in zip(means, known, strict=True)],
                  [max(v) - m for m, (_, v) in zip(means, known, strict=True)]]  # fmt: skip
        axes.errorbar(at, means, spread, marker=marker, markersize=5, capsize=2, label=method)
    axes.set_xticks(range(len(EPSILONS)), ["2", "4", "8", "32", "no noise,\nno clipping"])
    axes.set_xlabel("epsilon of the whole run (delta 1e-5)")
    axes.set_ylabel("test accuracy in %")
    axes.set_title("digits, 200 clients, dirichlet:alpha=0.3; bars: least and largest of three seeds", fontsize=8)
    save(figure, axes, "epsilon.svg")


def robust_figures() -> None:
    rows = read("robust/robust.csv")
    cells = by(rows, "split", "rule", "mixing", "attack", "attackers")
    splits = list(dict.fromkeys(row["split"] for row in rows))

    def mean(split: str, rule: str, mixing: str, attack: str, count: int, figure: str) -> float:
        found = cells[split, rule, mixing, attack if count else "none", str(count)]
        assert len(found) == SEEDS
        return statistics.mean(percents(found, figure))

    head = ["rule", "no attack", "sign flip 10 %", "20 %", "30 %", "a little is enough 10 %", "20 %", "30 %"]
    for split in splits:
        lines = [
            [
                rule + (f" + {mixing}" if mixing != "none" else ""),
                *(" / ".join(f"{mean(split, rule, mixing, *a, key):.0f}" for key in FIGURES) for a in ATTACKS),
            ]
            for rule, mixing in RULES
        ]
        print(f"**{split}**\n\n{table(head, lines)}\n")
    figure, axes = plt.subplots(len(FIGURES), len(splits), figsize=(7.5, 7.5), sharex=True, sharey="row")
    shown = [("mean", "none"), ("geometric", "none"), ("median", "none"), ("krum", "none"), ("median", "nnm")]
    for (i, key), (j, split) in ((a, b) for a in enumerate(FIGURES) for b in enumerate(splits)):
        for (rule, mixing), marker in zip(shown, "osD^v", strict=True):
            counts = (0, 2, 4, 6)
            values = [mean(split, rule, mixing, "signflip", count, key) for count in counts]
            label = rule + (f" + {mixing}" if mixing != "none" else "")
            axes[i, j].plot([100 * c / CLIENTS for c in counts], values, marker=marker, markersize=4, label=label)
        axes[i, j].set_xticks((0, 10, 20, 30))
        axes[i, j].set_title(split, fontsize=9)
        axes[i, j].set_xlabel("clients that flip the sign, in %" if i + 1 == len(FIGURES) else "")
        axes[i, j].set_ylabel(f"{FIGURES[key]}, in %" if j == 0 else "")
    save(figure, axes[0, 0], "robust.svg")


def save(figure: Any, legend: Any, name: str) -> None:
    """Write a figure to docs/, without the time, so that the same numbers give the same file."""
    legend.legend(fontsize=8, frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "docs" / name, metadata={"Date": None})


if __name__ == "__main__":
    mpl.rcParams |= {"svg.hashsalt": "fedskew", "svg.fonttype": "none"}
    epsilon_figures()
    robust_figures()
