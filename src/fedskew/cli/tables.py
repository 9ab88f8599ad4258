"""What `fedskew table` prints: the list of tables, progress over a table's runs, and the finished table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from fedskew.cli.console import Meter, make_screen, make_table, metered, print_json, record_text, resumable
from fedskew.core.settings import UsageError, choose
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.report.results import headings, lines, sentences
from fedskew.studies.tables.finished import finish, write_table
from fedskew.studies.tables.recipe import SCALES, Recipe, Scale, load_recipe, names
from fedskew.studies.tables.running import Work, choose_rates, missing_data, plan, run_table
from fedskew.studies.tables.verdicts import cells


def list_tables(as_json: bool) -> None:
    """Print every recipe with the number of its cells at both scales, and the minutes the reduced scale takes."""
    rows: list[dict[str, Any]] = []
    for name in names():
        recipe = load_recipe(name)
        count = {s: len(recipe.chosen(s, "rows", [])) * len(recipe.chosen(s, "columns", [])) for s in SCALES}
        rows.append({"name": name, "title": recipe.title, "cells": count, "minutes": recipe.reduced.minutes})
    if as_json:
        print_json({"tables": rows})
        return
    shown = [[r["name"], r["title"], r["cells"]["paper"], r["cells"]["reduced"], f"{r['minutes']:g}"] for r in rows]
    columns = ["name", "title", "cells", "reduced", "minutes, reduced"]
    make_screen(as_json).print(make_table("tables", columns, shown))


def show_table(
    name: str,
    scale: str,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    seeds: Sequence[int],
    out: Path | None,
    results: Path,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Run a table, write it as JSON, and print it. `rows`, `columns` and `seeds` may be empty for the recipe's.

    A whole table is written to the folder `results`, a part of one beside its runs.
    """
    recipe = load_recipe(name)
    chosen = choose("scale", scale, {s: s for s in SCALES})
    out = out or Path("runs/tables") / recipe.name
    screen = make_screen(as_json)
    with resumable("the same command"):
        recipe = choose_rates(recipe, chosen, rows, columns, out, **options)
    works = plan(recipe, chosen, rows, columns, seeds, out)
    missing = missing_data(works, options.get("data_dir"))
    to_do = list(dict.fromkeys(work.path for work in works if not work.finished and work.data not in missing))
    if not to_do and not any(work.finished for work in works):
        raise UsageError(next(iter(missing.values())))
    print_plan(recipe, chosen, works, screen)
    for sentence in missing.values():
        screen.print(f"note: {sentence}", markup=False)
    with resumable("the same command"), metered(screen, max(len(to_do), 1), unit="run") as meter:
        outcomes = list(run_table(works, TableProgress(meter, to_do), **options))
    table = finish(recipe, chosen, works, cells(recipe, outcomes))
    path = write_table(table, results if not rows and not columns else works[0].path.parents[1])
    if as_json:
        print_json(msgspec.to_builtins(table))
        return
    screen.print(make_table(f"{table.title}; {chosen} scale", headings(table), lines(table)))
    for sentence in sentences(table):
        screen.print(sentence, markup=False)
    screen.print(f"saved in {path}")


def print_plan(recipe: Recipe, scale: Scale, works: Sequence[Work], screen: Console) -> None:
    """How many runs the table needs and how many are finished; what the reduced scale leaves out."""
    paths = {work.path for work in works}
    done = {work.path for work in works if work.finished}
    screen.print(f"{recipe.name}, {scale} scale: {len(paths)} runs, {len(done)} of them finished")
    if scale == "reduced":
        screen.print(f"reduced: {recipe.reduced.what}")


class TableProgress:
    """Shows progress over the runs of a table, with an estimate of the time left. Called after each round."""

    def __init__(self, meter: Meter, to_do: Sequence[Path]) -> None:
        self.meter, self.started = meter, time.monotonic()
        self.position = {path: i for i, path in enumerate(to_do)}

    def __call__(self, work: Work, run: Run, record: Record) -> None:
        total, position = len(self.position), self.position[work.path]
        done = position + record.number / run.rounds
        minutes = (time.monotonic() - self.started) / done * (total - done) / 60
        text = f"{work.row} | {work.column} seed {work.seed} {record_text(record)}"
        line = f"run {position + 1} of {total}, {minutes:.0f} min left: {text}, round {record.number}/{run.rounds}"
        self.meter.update(done, text, line, always=record.number == run.rounds)
