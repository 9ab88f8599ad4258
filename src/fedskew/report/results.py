"""Finished tables as text: lines and sentences for the terminal, and the Markdown page docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.studies.tables.finished import FinishedTable, read_tables
from fedskew.studies.tables.recipe import load_recipe, names
from fedskew.studies.tables.verdicts import UNTESTABLE

LAST_FIVE = "mean of the last 5 evaluations"
INTRODUCTION = """# Results

Generated from `results/` by `fedskew table docs`; do not edit. Each table is run again by
the command above it. A reduced scale says nothing about the paper's own numbers: only order and gain count, and these
only if the baseline was trained to its end. Where it was not, or was not checked, the verdict is "cannot be tested at
this scale": a gain there, however large, may only show who starts faster. [papers.md](papers.md) has every claim.
"""


def number(value: float | None, table: FinishedTable, spread: float | None = None, *, signed: bool = False) -> str:
    """A value in the table's unit, with "±" and the spread unless that is None; "-" for no value.

    It has two decimals, or as many as the table's tolerance needs, and none from a thousand up.
    """
    if value is None:
        return "-"
    digits = max(2, math.ceil(-math.log10(table.tolerance))) if abs(value) < 1000 else 0
    return f"{value:{'+' if signed else ''}z.{digits}f}" + (f" ±{spread:.{digits}f}" if spread is not None else "")


def headings(table: FinishedTable) -> list[str]:
    """The titles of the columns of `lines`."""
    if table.scale == "paper":
        return ["setting", "method", "ours", LAST_FIVE, "paper", "difference", "verdict"]
    return ["setting", "method", "ours", LAST_FIVE, f"over {table.baseline}", "in the paper", "verdict"]


def lines(table: FinishedTable) -> list[list[str]]:
    """One line per cell.

    At the reduced scale the paper's own value is not shown, because far more work went into it: only the gain over the
    baseline is, ours beside the paper's.
    """
    made = []
    base = {cell.row: cell for cell in table.cells if cell.column == table.baseline}
    for cell in table.cells:
        other = base.get(cell.row)
        if table.scale == "paper":
            shown = [number(cell.paper, table), number(_difference(cell.ours, cell.paper), table, signed=True)]
        elif other is None or other is cell:
            shown = ["-", "-"]
        else:
            gains = _difference(cell.ours, other.ours), _difference(cell.paper, other.paper)
            shown = [number(gain, table, signed=True) for gain in gains]
        ours = number(cell.ours, table, cell.spread), number(cell.last_five, table)
        made.append([cell.row, cell.column, *ours, *shown, cell.verdict])
    return made


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def sentences(table: FinishedTable) -> list[str]:
    """The verdict in words: how many values are within the tolerance, whether each row keeps the paper's order, and
    why cells have no value."""
    made = []
    verdicts = [cell.verdict for cell in table.cells]
    unit = " points" if table.unit == "%" else f" {table.unit}".rstrip()
    if table.scale == "paper" and (within := verdicts.count("within")) + (outside := verdicts.count("outside")):
        made.append(f"{within} of {within + outside} values within {table.tolerance:g}{unit} of the paper's")
    for name, row in table.rows.items():
        order = "order of the methods kept" if row.kept == row.pairs else "order of the methods not kept"
        parts = [f"{order} ({row.kept} of {row.pairs} pairs)"] if row.pairs else []
        if why := untestable(table, name):
            parts = [f"{UNTESTABLE}: {table.baseline} {why}"]
        if row.gain is not None:
            ours, paper = (number(gain, table, signed=True) for gain in (row.gain, row.paper_gain))
            parts.append(f"{table.proposed} over {table.baseline} {ours}{unit}, in the paper {paper}")
        if parts:
            made.append(f"{name}: {'; '.join(parts)}")
    for cell in table.cells:
        if cell.failed:
            made.append(f"{cell.row}{'' if cell.absent else ' | ' + cell.column}: {cell.failed}")
    return list(dict.fromkeys(made))


def untestable(table: FinishedTable, row: str) -> str:
    """Why a row at the reduced scale says nothing about the paper's claim; "" if it does."""
    if table.scale == "paper":
        return ""
    base = next((cell for cell in table.cells if (cell.row, cell.column) == (row, table.baseline)), None)
    if base is None:
        return ""
    return "was not checked for convergence" if base.unsettled is None else base.unsettled


def outdated(table: FinishedTable) -> list[str]:
    """Columns whose method the recipe sets otherwise today, or no longer has: a default or the recipe has changed."""
    if table.table not in names():
        return []
    recipe, rows = load_recipe(table.table), {cell.column: cell.row for cell in table.cells}
    seed = recipe.chosen_seeds(table.scale)[0]

    def today(column: str) -> dict[str, Any]:
        if column not in recipe.parsed_columns:
            return {}
        settings: dict[str, Any] = recipe.experiments(rows[column], column, seed, table.scale)[0].as_dict()["method"]
        return settings

    return [column for column, settings in table.methods.items() if column in rows and today(column) != settings]


def overview(tables: Sequence[FinishedTable]) -> list[list[str]]:
    """A heading, then one line per row of every table: the paper's claim and what we measured of it."""
    made = [["table", "scale", "setting", "method", "over the baseline", "in the paper", "verdict", "pairs in order"]]
    for table in tables:
        for cell in table.cells:
            if cell.column == table.proposed:
                row = table.rows[cell.row]
                gains = [number(gain, table, signed=True) for gain in (row.gain, row.paper_gain)]
                pairs = f"{row.kept} of {row.pairs}" if row.pairs and not untestable(table, cell.row) else "-"
                title = table.title.partition(":")[0]
                made.append([title, table.scale, cell.row, cell.column, *gains, cell.verdict, pairs])
    return made


def markdown(tables: Sequence[FinishedTable]) -> str:
    """The page docs/results.md: an overview, then a section per table."""
    parts = [INTRODUCTION, grid(overview(tables))]
    for table in tables:
        seeds = sorted({seed for cell in table.cells for seed in cell.seeds})
        versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
        facts = [
            f"Seeds {', '.join(map(str, seeds))}; commit {table.commit or 'unknown'}; {table.date}; {versions}.",
            f"Reduced: {table.reduced}" if table.reduced else "",
            table.notes.strip(),
            f"**Of former settings, not run again with today's: {', '.join(old)}.**"
            if (old := outdated(table))
            else "",
            *(
                f"Learning rates chosen on validation data, {row}: "
                + ", ".join(f"{column} {rate:g}" for column, rate in rates.items())
                + "."
                for row, rates in table.rates.items()
            ),
        ]
        parts += [
            f"## {table.title}\n",
            f"    fedskew table {table.table} --scale {table.scale}\n",
            "\n\n".join(filter(None, facts)) + "\n",
            grid([headings(table), *lines(table)]),
            "\n".join(f"- {sentence}" for sentence in sentences(table)) + "\n",
        ]
    return "\n".join(parts)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first one is its heading."""
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in ruled) + "\n"


def write_results(folder: Path, page: Path) -> int:
    """Write the Markdown page of all finished tables in a folder; how many there are."""
    tables = read_tables(folder)
    if not tables:
        raise UsageError(f"{folder} holds no finished table; `fedskew table NAME` makes one.")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, markdown(tables).encode())
    return len(tables)
