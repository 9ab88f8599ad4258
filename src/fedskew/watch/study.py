"""A study of many runs in the list, a task of the board or a race of `advise`: read from its progress.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedskew.evaluation.figures import FIGURES, Figure
from fedskew.experiment.progress import PROGRESS, Step, StudyProgress
from fedskew.report import charts
from fedskew.watch.entry import Entry, Row, short

MOST_CURVES = 12  # methods that are drawn: the best so far
MOST_LINES, MOST_PARTS = 200, 50  # methods in the table and failures below it; columns
COMMANDS = {"board": "fedskew board run", "advise": "fedskew advise"}
NOTHING = StudyProgress(kind="board", title="", figure="global")


class Study(Entry):
    """One study."""

    files, main = (PROGRESS,), PROGRESS

    def _row(self, locked: bool) -> Row:
        self.progress: StudyProgress = self.read(PROGRESS, StudyProgress) or NOTHING
        now, stamp = self.progress, self.stamp(PROGRESS)
        state, why = self._unfinished(locked)
        state = "finished" if now.finished and not locked else state
        running = state == "running"
        return Row(
            id=self.id,
            name=self.name,
            title=short(now.title),
            method=COMMANDS[now.kind],
            data="",
            seed="",
            state=state,
            why=short(why),
            round=now.done,
            rounds=now.total,
            unit=short(now.unit),
            now=short(now.now) if running else "",
            ends=now.ends if running else None,
            figure="",
            value="",
            written=stamp[1] / 1e9 if stamp else 0.0,
        )

    def parts(self) -> dict[str, dict[str, Any]]:
        """What the page shows of it."""
        figure = FIGURES.get(self.progress.figure, FIGURES["global"])
        found = by_method(self.progress.steps, figure)
        made = {"cells": cells(found, figure, self.progress.note), "curves": curves(found, figure)}
        return {name: part for name, part in made.items() if part is not None}


def by_method(steps: Sequence[Step], figure: Figure) -> dict[str, list[Step]]:
    """Steps by method, the best so far first: by rounds, as of a race, by finished seeds, then by their mean."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        found.setdefault(short(step.method), []).append(step)
    sign = 1 if figure.better == "higher" else -1

    def key(method: str) -> tuple[int, int, float]:
        values = seeds_of(found[method])
        return -max(step.rounds for step in found[method]), -len(values), -sign * sum(values) / (len(values) or 1)

    return {method: found[method] for method in sorted(found, key=key)}


def seeds_of(steps: Sequence[Step]) -> list[float]:
    """The values of the finished runs that are more than trials."""
    return [step.value for step in steps if step.value is not None and not step.trial]


def cells(found: dict[str, list[Step]], figure: Figure, note: str) -> dict[str, Any] | None:
    """A table of methods and their runs."""
    if not found:
        return None
    steps = [step for of in found.values() for step in of]
    parts = list(dict.fromkeys(short(step.part) for step in sorted(steps, key=_place)))[:MOST_PARTS]
    rounds = sorted({step.rounds for step in steps} - {0})
    whole = max(len(seeds_of(of)) for of in found.values())  # means over fewer seeds could not be compared
    rows = []
    for method, of in list(found.items())[:MOST_LINES]:
        texts = {short(step.part): "failed" if step.value is None else figure.text(step.value) for step in of}
        reached = [str(max(step.rounds for step in of) or "")] if len(rounds) > 1 else []
        mean = figure.text(statistics.fmean(values)) if len(values := seeds_of(of)) == whole > 0 else ""
        rows.append([method, *reached, *(texts.get(part, "") for part in parts), mean])
    unit = f", in {figure.unit}" if figure.unit else ""
    return {
        "kind": "table",
        "title": f"Finished runs: {figure.words}{unit}",
        "columns": ["method", *(["rounds"] if len(rounds) > 1 else []), *parts, "mean over seeds"],
        "rows": rows,
        "note": f"Most finished seeds first, then by their mean, which needs all of them. {short(note)}",
        "list": [f"{short(s.method)}, {short(s.part)}: {short(s.failed)}" for s in steps if s.failed][:MOST_LINES],
        "list_title": "Failed",
    }


def _place(step: Step) -> tuple[bool, str, float]:
    """Where a run stands in the table: trials first, numbers in their order."""
    words, _, number = step.part.rpartition(" ")
    try:
        return not step.trial, words, float(number)
    except ValueError:
        return not step.trial, step.part, 0.0


def curves(found: dict[str, list[Step]], figure: Figure) -> charts.Chart | None:
    """The figure by round of the methods that are best so far: the mean over seeds."""
    scale = 100 if figure.unit == "%" else 1
    values = {
        method: [{round: scale * value for round, value in step.curve} for step in of if step.curve and not step.trial]
        for method, of in found.items()
    }
    shown = dict([(method, runs) for method, runs in values.items() if runs][:MOST_CURVES])
    chart = charts.lines("By round", [(figure.words, shown)], unit=figure.unit)
    return chart if chart["views"] else None
