"""A published table carried out: what is missing is run, and ours stands beside the paper's with a verdict."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.evaluation.figures import FIGURES as PLACES
from fedskew.evaluation.figures import figure, headline, to_target
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import versions
from fedskew.experiment.tracking import flat
from fedskew.federation.protocol import Record
from fedskew.studies.compare import carry, slug
from fedskew.studies.tables.recipe import FIGURES, Recipe, Scale

ROOT = Path(__file__).parents[4]  # of a working copy


@dataclass(frozen=True)
class Work:
    """One run of a table; a cell is the mean of several where it stands for several settings."""

    row: str
    column: str
    seed: int
    variant: int
    experiment: Experiment
    path: Path  # it ends in a hash of the settings, so that a changed recipe finds no old result

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    def done(self) -> dict[str, Any] | None:
        """The row of a run that is finished, without putting the experiment together again."""
        if not self.finished:
            return None
        settings = from_dict(read_toml(self.path / "settings.toml"))
        if settings.as_dict() != self.experiment.as_dict():
            raise UsageError(f"{self.path} holds a run with other settings; remove it, or give another --out.")
        records = [json.loads(line) for line in (self.path / "records.jsonl").read_text().splitlines()]
        result = json.loads((self.path / "result.json").read_text())
        return {**result, "directory": str(self.path), "failed": "", "records": records}


def plan(
    recipe: Recipe, scale: Scale, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Work]:
    """Every run the wanted cells need, row by row; the same experiment in two columns is one directory."""
    works = []
    for row in recipe.chosen(scale, "rows", rows):
        for seed in seeds or recipe.chosen_seeds(scale):
            for column in recipe.chosen(scale, "columns", columns):
                for variant, experiment in enumerate(recipe.experiments(row, column, seed, scale)):
                    mark = hashlib.sha256(experiment.to_toml().encode()).hexdigest()[:10]
                    path = out / slug(row) / f"{experiment.method_name}-s{seed}-{mark}"
                    works.append(Work(row, column, seed, variant, experiment, path))
    return works


@lru_cache(maxsize=2)
def _data(name: str, folder: Path | None) -> DataSet:
    return load(name, folder)


Progress = Callable[[Work, Run, Record], None]


def absent(works: Sequence[Work], data_dir: Path | None) -> dict[str, str]:
    """Data sets that are not there, each with the sentence that says how to get it."""
    told = {}
    for name in dict.fromkeys(str(work.experiment.data) for work in works if not work.finished):
        try:
            _data(name, data_dir)
        except UsageError as mistake:
            told[name] = str(mistake)
    return told


def carry_out(
    works: Sequence[Work], watch: Progress, *, data_dir: Path | None = None, **options: Any
) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Each piece of work with its row. A data set that is not there is told in the row; the others go on."""
    missing = absent(works, data_dir)
    for work in works:
        row, name = work.done(), str(work.experiment.data)
        if row is None and name in missing:
            row = {"failed": f"the data set {name} is not there", "absent": True, "records": []}
        elif row is None:
            data = _data(name, data_dir)

            def watched(run: Run, record: Record, work: Work = work) -> None:
                watch(work, run, record)

            row = carry(replace(work.experiment, data=data), work.path, watched, **options)
        yield work, row


def measured(word: str, row: dict[str, Any], baseline: dict[str, Any] | None) -> float | None:
    """One figure of one run, in the table's unit; None where the run has none."""
    if row["failed"]:
        return None
    if word in PLACES:
        value = figure(row, PLACES[word])
        return None if value is None else 100 * value
    if word == "rounds_to_baseline":
        target = headline(baseline["metrics"] or {}) if baseline and not baseline["failed"] else None
        return None if target is None else to_target(row["records"], target)["rounds"]
    last = row["records"][-1]
    if word == "parameters":
        return float(sum(last["bytes_up"].values()) / max(len(last["trained"]), 1) / 4e6)
    if word == "round_seconds":
        return float(row["seconds"] / len(row["records"]))
    value = row["diagnostics"][word]
    return None if value is None else float(value)


@dataclass(frozen=True)
class Cell:
    """Ours and the paper's, in the table's unit."""

    row: str
    column: str
    ours: float | None  # mean over seeds
    spread: float | None
    paper: float | None
    seeds: tuple[int, ...]
    failed: str = ""  # why there is no number: it diverged, or the data are not there
    absent: bool = False  # nothing was run, because data are missing
    verdict: str = ""


def cells(recipe: Recipe, results: Sequence[tuple[Work, dict[str, Any]]]) -> list[Cell]:
    """One a row and column, in the table's order."""
    base = {(w.row, w.seed, w.variant): row for w, row in results if w.column == recipe.baseline}
    made = []
    for row, column in dict.fromkeys((w.row, w.column) for w, _ in results):
        mine = [(w, r) for w, r in results if (w.row, w.column) == (row, column)]
        word = recipe.figure_of(column)
        values: dict[int, list[float | None]] = {}
        for work, result in mine:
            value = measured(word, result, base.get((row, work.seed, work.variant)))
            values.setdefault(work.seed, []).append(value)
        known = [statistics.mean(v for v in each if v is not None) for each in values.values() if None not in each]
        why = next((r["failed"] for _, r in mine if r["failed"]), "")
        whole = len(known) == len(values)
        made.append(
            Cell(
                row,
                column,
                ours=statistics.mean(known) if whole else None,
                spread=statistics.stdev(known) if whole and len(known) > 1 else None,
                paper=recipe.paper(row, column),
                seeds=tuple(values),
                failed=why,
                absent=any(r.get("absent") for _, r in mine),
            )
        )
    return made


def judged(recipe: Recipe, made: Sequence[Cell], scale: Scale) -> tuple[list[Cell], dict[str, dict[str, Any]]]:
    """The cells with their verdicts, and a verdict on each row: order of the methods, gain over the baseline.

    A difference in the paper that is below the tolerance is no order. At the reduced scale only order and gain count.
    """
    rows: dict[str, dict[str, Any]] = {}
    verdicts = []
    for name in dict.fromkeys(cell.row for cell in made):
        mine = {cell.column: cell for cell in made if cell.row == name}
        base = mine.get(recipe.baseline)
        verdicts += [replace(cell, verdict=_verdict(recipe, cell, base, scale)) for cell in mine.values()]
        kept = [_same_order(recipe, a, b) for a, b in combinations(mine.values(), 2)]
        pairs = [k for k in kept if k is not None]
        lead = mine.get(recipe.proposed)
        rows[name] = {
            "pairs": len(pairs),
            "kept": sum(pairs),
            "gain": _gain(lead, base, "ours"),
            "paper_gain": _gain(lead, base, "paper"),
        }
    return verdicts, rows


def _verdict(recipe: Recipe, cell: Cell, base: Cell | None, scale: Scale) -> str:
    if cell.absent:
        return "no data"
    if cell.failed:
        return "diverged"
    if cell.ours is None:
        return "not reached" if recipe.figure_of(cell.column) == "rounds_to_baseline" else "has no such figure"
    if scale == "paper":
        if cell.paper is None:
            return "no value in the paper"
        return "within" if abs(cell.ours - cell.paper) <= recipe.tolerance else "outside"
    gain, paper = _gain(cell, base, "ours"), _gain(cell, base, "paper")
    if cell is base or gain is None or paper is None:
        return ""
    if abs(paper) < recipe.tolerance:
        return "a tie in the paper"
    kept = gain * paper > 0
    if (paper > 0) == (recipe.better == "higher"):  # ahead of the baseline in the paper
        return "gain kept" if kept else "gain lost"
    return "loss kept" if kept else "no loss here"


def _gain(cell: Cell | None, base: Cell | None, which: str) -> float | None:
    a, b = getattr(cell, which, None), getattr(base, which, None)
    return None if a is None or b is None else float(a - b)


def _same_order(recipe: Recipe, a: Cell, b: Cell) -> bool | None:
    """Whether two methods stand as in the paper; None where the paper has them level, or ours has neither."""
    if a.paper is None or b.paper is None or abs(a.paper - b.paper) < recipe.tolerance or a.absent or b.absent:
        return None
    if FIGURES[recipe.figure_of(a.column)] != FIGURES[recipe.figure_of(b.column)] or a.ours is b.ours is None:
        return None
    last = float("-inf") if recipe.better == "higher" else float("inf")  # a method that diverged is behind all
    ours = [last if cell.ours is None else cell.ours for cell in (a, b)]
    return (ours[0] > ours[1]) == (a.paper > b.paper) and ours[0] != ours[1]


def commit() -> str:
    """Of the working copy this package stands in; "" where there is none."""
    if not (ROOT / ".git").exists():
        return ""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() if told.returncode == 0 else ""


def summary(recipe: Recipe, scale: Scale, works: Sequence[Work], made: Sequence[Cell], **more: Any) -> dict[str, Any]:
    """All that is kept of a table: cells, verdicts, and what they come from (seeds, commit, versions, settings)."""
    verdicts, rows = judged(recipe, made, scale)
    every = [(work.row, flat(work.experiment.as_dict())) for work in works]
    common = _shared([settings for _, settings in every])
    for name, row in rows.items():
        own = _shared([settings for row_name, settings in every if row_name == name])
        row["settings"] = {key: value for key, value in own.items() if key not in common}
    return {
        "table": recipe.name,
        "scale": scale,
        "title": recipe.title,
        "figure": recipe.figure,
        "unit": FIGURES[recipe.figure],
        "better": recipe.better,
        "tolerance": recipe.tolerance,
        "baseline": recipe.baseline,
        "proposed": recipe.proposed,
        "reduced": recipe.reduced.what if scale == "reduced" else "",
        "notes": recipe.notes,
        "commit": commit(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "settings": common,
        "methods": {work.column: work.experiment.as_dict()["method"] for work in works},
        "runs": sorted({f"{work.path.parent.name}/{work.path.name}" for work in works}),
        "cells": [vars(cell) for cell in verdicts],
        "rows": rows,
        **more,
    }


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all of them agree on."""
    first = settings[0]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in settings)}


def keep(told: dict[str, Any], folder: Path) -> Path:
    """The table as a small file that can be committed: <table>-<scale>.json."""
    path = folder / f"{told['table']}-{told['scale']}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(told, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    return path
