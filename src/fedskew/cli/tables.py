"""Finished tables as people read them: in the terminal, in the list of tables, and as docs/results.md."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress

from fedskew.cli.console import PROGRESS, QUIET, console, emit, table, words
from fedskew.core.settings import UsageError, choose
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.tables.recipe import Recipe, Scale, load_recipe, names
from fedskew.studies.tables.running import Work, absent, carry_out, cells, keep, plan, summary

COLUMNS = {
    "paper": ("setting", "method", "ours", "paper", "difference", "verdict"),
    "reduced": ("setting", "method", "ours", "over {baseline}", "in the paper", "verdict"),
}
Told = dict[str, Any]
NEEDED = (  # of a finished table, beside its cells
    *("table", "title", "scale", "unit", "tolerance", "baseline", "proposed", "rows"),
    *("reduced", "notes", "commit", "versions", "date"),
)


def list_tables(as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in names():
        recipe = load_recipe(name)
        cells = {s: len(recipe.chosen(s, "rows", [])) * len(recipe.chosen(s, "columns", [])) for s in SCALES}
        rows.append({"name": name, "title": recipe.title, "cells": cells, "minutes": recipe.reduced.minutes})
    if as_json:
        emit({"tables": rows})
        return
    shown = [[r["name"], r["title"], r["cells"]["paper"], r["cells"]["reduced"], f"{r['minutes']:g}"] for r in rows]
    screen = console(as_json)
    screen.print(table("tables", ["name", "title", "cells", "reduced", "minutes, reduced"], shown))


SCALES: tuple[Scale, ...] = get_args(Scale)


class Clock:
    """Progress over a whole table: runs done, and how long the rest will take if it goes on like this."""

    def __init__(self, screen: Console, bar: Progress, works: Sequence[Work]) -> None:
        self.screen, self.bar, self.began, self.last = screen, bar, time.monotonic(), time.monotonic()
        paths = list(dict.fromkeys(work.path for work in works if not work.finished))
        self.place = {path: i for i, path in enumerate(paths)}
        self.task = bar.add_task("", total=max(len(paths), 1), words="")

    def __call__(self, work: Work, run: Run, record: Record) -> None:
        done = self.place[work.path] + (record.round + 1) / run.rounds
        what = f"{work.row} | {work.column} seed {work.seed} {words(record)}"
        self.bar.update(self.task, completed=done, words=what)
        now = time.monotonic()
        if not self.screen.is_terminal and (now - self.last > QUIET or record.round == run.rounds - 1):
            left = (now - self.began) / done * (len(self.place) - done)
            whole = f"run {self.place[work.path] + 1} of {len(self.place)}, {left / 60:.0f} min left"
            self.screen.print(f"{whole}: {what}, round {record.round + 1}/{run.rounds}")
            self.last = now


def show_table(
    name: str,
    scale: str,
    rows: Sequence[str],
    columns: Sequence[str],
    seeds: Sequence[int],
    out: Path | None,
    results: Path,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    recipe = load_recipe(name)
    chosen = choose("scale", scale, {s: s for s in SCALES})
    works = plan(recipe, chosen, rows, columns, seeds, out or Path("runs/tables") / recipe.name)
    screen = console(as_json)
    missing = absent(works, options.get("data_dir"))
    to_do = [work for work in works if work.finished or str(work.experiment.data) not in missing]
    if not to_do:
        raise UsageError(next(iter(missing.values())))
    introduce(recipe, chosen, works, screen)
    for sentence in missing.values():
        screen.print(f"note: {sentence}", markup=False)
    with Progress(*PROGRESS, console=screen, disable=not screen.is_terminal) as bar:
        try:
            found = list(carry_out(works, Clock(screen, bar, to_do), **options))
        except KeyboardInterrupt:
            print("fedskew: stopped; the same command goes on from here", file=sys.stderr)
            raise SystemExit(130) from None
    told = summary(recipe, chosen, works, cells(recipe, found))
    path = keep(told, results if not rows and not columns else works[0].path.parents[1])
    if as_json:
        emit(told)
        return
    screen.print(table(f"{told['title']}; {chosen} scale", headings(told), lines(told)))
    for sentence in sentences(told):
        screen.print(sentence, markup=False)
    screen.print(f"all of it in {path}")


def introduce(recipe: Recipe, scale: Scale, works: Sequence[Work], screen: Console) -> None:
    paths = {work.path for work in works}
    done = {work.path for work in works if work.finished}
    screen.print(f"{recipe.name}, {scale} scale: {len(paths)} runs, {len(done)} of them done")
    if scale == "reduced":
        screen.print(f"reduced: {recipe.reduced.what}")


def number(value: float | None, told: Told, spread: float | None = None, sign: bool = False) -> str:
    """Two decimals, or as many as the table's tolerance has; none from a thousand up."""
    if value is None:
        return "-"
    digits = max(2, math.ceil(-math.log10(told["tolerance"]))) if abs(value) < 1000 else 0
    return f"{value:{'+' if sign else ''}z.{digits}f}" + (f" ±{spread:.{digits}f}" if spread is not None else "")


def headings(told: Told) -> list[str]:
    return [word.format(**told) for word in COLUMNS[told["scale"]]]


def lines(told: Told) -> list[list[str]]:
    """A line a cell. At the reduced scale the paper's own number is not shown: it was got with far more work."""
    made = []
    base = {cell["row"]: cell for cell in told["cells"] if cell["column"] == told["baseline"]}
    for cell in told["cells"]:
        ours, paper, other = cell["ours"], cell["paper"], base.get(cell["row"])
        against = {"ours": None, "paper": None} if other is None or other is cell else other
        if told["scale"] == "paper":
            shown = [number(paper, told), number(_less(ours, paper), told, sign=True)]
        else:
            gains = _less(ours, against["ours"]), _less(paper, against["paper"])
            shown = [number(gain, told, sign=True) for gain in gains]
        made.append([cell["row"], cell["column"], number(ours, told, cell["spread"]), *shown, cell["verdict"]])
    return made


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def sentences(told: Told) -> list[str]:
    """The verdict in words: how many cells are within the tolerance, and row by row whether the order is kept."""
    made = []
    judged = [cell["verdict"] for cell in told["cells"]]
    unit = " points" if told["unit"] == "%" else f" {told['unit']}".rstrip()
    if told["scale"] == "paper" and (within := judged.count("within")) + (outside := judged.count("outside")):
        made.append(f"{within} of {within + outside} values within {told['tolerance']:g}{unit} of the paper's")
    for name, row in told["rows"].items():
        order = "order of the methods kept" if row["kept"] == row["pairs"] else "order of the methods not kept"
        parts = [f"{order} ({row['kept']} of {row['pairs']} pairs)"] if row["pairs"] else []
        if row["gain"] is not None:
            paper = number(row["paper_gain"], told, sign=True)
            ours = number(row["gain"], told, sign=True)
            parts.append(f"{told['proposed']} over {told['baseline']} {ours}{unit}, in the paper {paper}")
        if parts:
            made.append(f"{name}: {'; '.join(parts)}")
    for cell in told["cells"]:
        if cell["failed"]:
            made.append(f"{cell['row']}{'' if cell['absent'] else ' | ' + cell['column']}: {cell['failed']}")
    return list(dict.fromkeys(made))


def read_results(folder: Path) -> list[Told]:
    made = []
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a finished table: {error}.") from None
        if isinstance(told, dict) and "cells" in told:
            if lacking := [key for key in NEEDED if key not in told]:
                raise UsageError(f"{path} is not a finished table: it lacks {', '.join(lacking)}.")
            made.append(told)
    return made


def write_docs(folder: Path, page: Path) -> None:
    """docs/results.md, from the finished tables of a folder."""
    every = read_results(folder)
    if not every:
        raise UsageError(f"{folder} holds no finished table; `fedskew table NAME` makes one.")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(every))
    print(f"{len(every)} tables written to {page}")


def markdown(every: Sequence[Told]) -> str:
    parts = [
        "# Results\n\nGenerated from `results/` by `fedskew table docs`; do not edit. Each table is run again by\n"
        "the command above it. A reduced scale says nothing about the paper's own numbers: only order and gain count.\n"
    ]
    parts.append(_grid(overview(every)))
    for told in every:
        parts.append(f"## {told['title']}\n")
        parts.append(f"    fedskew table {told['table']} --scale {told['scale']}\n")
        seeds = sorted({seed for cell in told["cells"] for seed in cell["seeds"]})
        versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        facts = [
            f"Seeds {', '.join(map(str, seeds))}; commit {told['commit'] or 'unknown'}; {told['date']}; {versions}.",
            f"Reduced: {told['reduced']}" if told["reduced"] else "",
            told["notes"].strip(),
        ]
        parts.append("\n\n".join(filter(None, facts)) + "\n")
        parts.append(_grid([headings(told), *lines(told)]))
        parts.append("\n".join(f"- {sentence}" for sentence in sentences(told)) + "\n")
    return "\n".join(parts)


def overview(every: Sequence[Told]) -> list[list[str]]:
    """A line for each row of every table: what its paper claims, and what became of it here, divergence included."""
    made = [["table", "scale", "setting", "method", "over the baseline", "in the paper", "verdict", "pairs in order"]]
    for told in every:
        for cell in told["cells"]:
            if cell["column"] == told["proposed"]:
                row = told["rows"][cell["row"]]
                gains = [number(row[which], told, sign=True) for which in ("gain", "paper_gain")]
                pairs = f"{row['kept']} of {row['pairs']}" if row["pairs"] else "-"
                title = told["title"].partition(":")[0]
                made.append([title, told["scale"], cell["row"], cell["column"], *gains, cell["verdict"], pairs])
    return made


def _grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table of Markdown, the first one its heading."""
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in ruled) + "\n"
