"""A finished table as a small JSON file that can be committed: what it holds, how it is written and read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES
from fedskew.experiment.run_directory import versions
from fedskew.experiment.tracking import flat
from fedskew.studies.provenance import commit
from fedskew.studies.tables.recipe import Recipe, Scale
from fedskew.studies.tables.running import Work
from fedskew.studies.tables.verdicts import UNTESTABLE, Cell, RowVerdict, with_verdicts, withdrawn

CLAIMS = ("gain kept", "gain lost", "loss kept", "no loss here", "a tie in the paper")  # at the reduced scale


class FinishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Cells, verdicts, and everything they come from: seeds, commit, versions, settings."""

    table: str  # the recipe's name
    scale: Scale
    title: str
    figure: str = ""
    unit: str  # of the figure: "%", "rounds", ...
    better: str = ""
    tolerance: float
    baseline: str
    proposed: str
    reduced: str  # what the reduced scale leaves out, in words; "" at the paper's scale
    notes: str
    commit: str  # "" if unknown
    versions: dict[str, str]
    date: str
    settings: dict[str, Any] = {}  # that all runs share
    methods: dict[str, Any] = {}  # column -> the method's settings
    rates: dict[str, dict[str, float]] = {}  # row -> control -> the learning rate chosen for it on validation data
    runs: list[str] = []  # directories, below the folder of the runs
    cells: list[Cell]
    rows: dict[str, RowVerdict]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(msgspec.to_builtins(self), indent=1) + "\n"


def finish(recipe: Recipe, scale: Scale, works: Sequence[Work], made: Sequence[Cell]) -> FinishedTable:
    """The table of these cells, with verdicts and the settings of the runs."""
    checked, rows = with_verdicts(recipe, made, scale)
    every = [(work.row, flat(work.experiment.as_dict())) for work in works]
    common = _shared([settings for _, settings in every])
    for name, row in rows.items():
        of_row = _shared([settings for row_name, settings in every if row_name == name])
        rows[name] = replace(row, settings={key: value for key, value in of_row.items() if key not in common})
    return FinishedTable(
        table=recipe.name,
        scale=scale,
        title=recipe.title,
        figure=recipe.figure,
        unit=FIGURES[recipe.figure].unit,
        better=recipe.better,
        tolerance=recipe.tolerance,
        baseline=recipe.baseline,
        proposed=recipe.proposed,
        reduced=recipe.reduced.what if scale == "reduced" else "",
        notes=recipe.notes,
        commit=commit(),
        versions={name: str(version) for name, version in versions().items()},  # torch's is a subclass of str
        date=time.strftime("%Y-%m-%d"),
        settings=common,
        methods={work.column: work.experiment.as_dict()["method"] for work in works},
        rates={
            row: {c: rate for (r, c), rate in recipe.chosen_rates.items() if r == row}
            for row in dict.fromkeys(row for row, _ in recipe.chosen_rates)
        },
        runs=sorted({f"{work.path.parent.name}/{work.path.name}" for work in works}),
        cells=checked,
        rows=rows,
    )


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that are equal in all of them."""
    first = settings[0]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in settings)}


def write_table(table: FinishedTable, folder: Path) -> Path:
    """Write <table>-<scale>.json to a folder; the file's path."""
    path = folder / f"{table.table}-{table.scale}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table.to_json().encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    return path


def _withdraw(table: FinishedTable) -> FinishedTable:
    """The table without verdicts that rest on a baseline whose convergence was not checked."""
    base = {cell.row: cell for cell in table.cells if cell.column == table.baseline}
    cells = [
        replace(cell, verdict=UNTESTABLE)
        if cell.verdict in CLAIMS and withdrawn(cell, base.get(cell.row), table.scale)
        else cell
        for cell in table.cells
    ]
    return msgspec.structs.replace(table, cells=cells)


def read_tables(folder: Path) -> list[FinishedTable]:
    """Every finished table in a folder. JSON files without cells are ignored; damaged ones are a `UsageError`."""
    made = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text())
            if isinstance(values, dict) and "cells" in values:
                needed = [field.name for field in msgspec.structs.fields(FinishedTable) if field.required]
                if lacking := [name for name in needed if name not in values]:
                    raise ValueError(f"it lacks {', '.join(lacking)}")
                made.append(_withdraw(msgspec.convert(values, FinishedTable)))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a finished table: {error}.") from None
    return made
