"""Our values beside the paper's, and the rules that say whether a published table was reproduced."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from fedskew.evaluation.figures import FIGURES, headline
from fedskew.evaluation.rounds import to_target
from fedskew.studies.convergence import last_mean, unsettled_curve
from fedskew.studies.execution import Outcome
from fedskew.studies.tables.recipe import Recipe, Scale
from fedskew.studies.tables.running import Work

UNTESTABLE = "cannot be tested at this scale"
OUR_PRESET = "our preset: no verdict on the paper"


def measured(key: str, outcome: Outcome, baseline: Outcome | None) -> float | None:
    """One figure of one run, in the table's unit (accuracies in percent); None if the run has none.

    `baseline` is the baseline's run with the same row and seed; only `rounds_to_baseline` needs it.
    """
    if outcome.failed or outcome.result is None:
        return None
    if key == "rounds_to_baseline":
        target = headline(baseline.result.metrics) if baseline and not baseline.failed and baseline.result else None
        return None if target is None else to_target(outcome.records, target)["rounds"]
    if key == "parameters":
        last = outcome.records[-1]
        return float(sum(last.bytes_up.values()) / max(len(last.trained), 1) / 4e6)  # 4 bytes each
    if key == "round_seconds":
        return float(outcome.result.seconds / len(outcome.records))
    value = FIGURES[key].read(outcome.result)
    return 100 * value if value is not None and FIGURES[key].unit == "%" else value


def last_five(key: str, outcome: Outcome) -> float | None:
    """The mean of an accuracy over the last five evaluations of a run, in percent; None if it has none.

    One round's accuracy swings by several points where clients lack classes; the mean swings less.
    """
    if outcome.failed or FIGURES[key].unit != "%":
        return None
    evaluated = [record for record in outcome.records if record.metrics is not None]
    values = [value for record in evaluated if (value := FIGURES[key].read(record)) is not None]
    return 100 * last_mean(values) if values else None


@dataclass(frozen=True)
class Cell:
    """One cell of a table: our value and the paper's, in the table's unit."""

    row: str
    column: str
    ours: float | None  # mean over seeds; None if a seed has no value
    spread: float | None  # standard deviation over seeds; None for one seed
    paper: float | None  # None if the paper has no value
    seeds: tuple[int, ...]
    failed: str = ""  # why there is no value: the run diverged, or its data set is not available
    absent: bool = False  # nothing was run, because the data set is not available
    verdict: str = ""
    last_five: float | None = None  # like `ours`, of the mean of the last five evaluations; None: no such figure
    control: bool = False  # a column that the paper does not have
    unsettled: str | None = None  # of the baseline: why nothing can be compared with it; "": it has converged


@dataclass(frozen=True)
class RowVerdict:
    """What a row as a whole says about the paper's claim."""

    pairs: int  # pairs of methods that the paper tells apart by at least the tolerance
    kept: int  # pairs that ours puts in the same order
    gain: float | None  # ours: the proposed method's value less the baseline's
    paper_gain: float | None  # the paper's
    settings: dict[str, Any] = field(default_factory=dict)  # that all runs of this row share, but not all of the table


def cells(recipe: Recipe, outcomes: Sequence[tuple[Work, Outcome]]) -> list[Cell]:
    """One cell per row and column, in the table's order, still without verdicts.

    A cell is the mean over the row's settings, then over seeds. It has no value unless all its runs have one.
    """
    base = {(w.row, w.seed, w.variant): outcome for w, outcome in outcomes if w.column == recipe.baseline}
    made = []
    for row, column in dict.fromkeys((w.row, w.column) for w, _ in outcomes):
        here = [(w, outcome) for w, outcome in outcomes if (w.row, w.column) == (row, column)]
        values: dict[int, list[float | None]] = {}
        late: dict[int, list[float | None]] = {}
        for work, outcome in here:
            key = recipe.figure_of(column)
            values.setdefault(work.seed, []).append(measured(key, outcome, base.get((row, work.seed, work.variant))))
            late.setdefault(work.seed, []).append(last_five(key, outcome))
        means, late_means = _means(values), _means(late)
        made.append(
            Cell(
                row,
                column,
                ours=statistics.mean(means) if means else None,
                spread=statistics.stdev(means) if len(means) > 1 else None,
                last_five=statistics.mean(late_means) if late_means else None,
                control=column in recipe.controls,
                paper=recipe.paper(row, column),
                seeds=tuple(values),
                failed=next((outcome.failed for _, outcome in here if outcome.failed), ""),
                absent=any(outcome.no_data for _, outcome in here),
                unsettled=unsettled([outcome for _, outcome in here]) if column == recipe.baseline else None,
            )
        )
    return made


def _means(values: Mapping[int, Sequence[float | None]]) -> list[float]:
    """The mean of each seed's values; empty unless all have a value."""
    if any(None in each for each in values.values()):
        return []
    return [statistics.mean(v for v in each if v is not None) for each in values.values()]


def unsettled(outcomes: Sequence[Outcome]) -> str:
    """Why one of these runs has not converged (see `unsettled_curve`); "" if all of them have."""
    for outcome in outcomes:
        evaluated = [record.metrics for record in outcome.records if record.metrics is not None]
        curve = [accuracy for metrics in evaluated if (accuracy := headline(metrics)) is not None]
        if why := unsettled_curve(curve, evaluated[-1].classes if evaluated else 0):
            return why
    return ""


def withdrawn(cell: Cell, base: Cell | None, scale: Scale) -> bool:
    """Whether a verdict on this cell would rest on a baseline that has not converged, or was not checked."""
    return scale == "reduced" and cell is not base and base is not None and base.unsettled != ""


def with_verdicts(recipe: Recipe, made: Sequence[Cell], scale: Scale) -> tuple[list[Cell], dict[str, RowVerdict]]:
    """The cells with their verdicts, and a verdict on each row.

    At the paper's scale a cell is within the tolerance of the paper's value or not. At the reduced scale only the order
    of methods and the gain over the baseline count, and only if the baseline has converged. Methods that the paper has
    closer than the tolerance are a tie. A column with a preset of ours gets no verdict.
    """
    rows: dict[str, RowVerdict] = {}
    checked = []
    for name in dict.fromkeys(cell.row for cell in made):
        row = {cell.column: cell for cell in made if cell.row == name}
        base, proposed = row.get(recipe.baseline), row.get(recipe.proposed)
        if proposed is not None and not recipe.is_published(recipe.proposed):
            proposed = None
        checked += [replace(cell, verdict=_verdict(recipe, cell, base, scale)) for cell in row.values()]
        pairs = [kept for a, b in combinations(row.values(), 2) if (kept := _same_order(recipe, a, b)) is not None]
        rows[name] = RowVerdict(len(pairs), sum(pairs), _gain(proposed, base, "ours"), _gain(proposed, base, "paper"))
    return checked, rows


def _verdict(recipe: Recipe, cell: Cell, base: Cell | None, scale: Scale) -> str:
    if cell.absent:
        return "no data"
    if cell.failed:
        return "diverged"
    if cell.ours is None:
        return "not reached" if recipe.figure_of(cell.column) == "rounds_to_baseline" else "has no such figure"
    if cell.control:
        return "control"
    if not recipe.is_published(cell.column):
        return OUR_PRESET
    if scale == "paper":
        if cell.paper is None:
            return "no value in the paper"
        return "within" if abs(cell.ours - cell.paper) <= recipe.tolerance else "outside"
    gain, paper = _gain(cell, base, "ours"), _gain(cell, base, "paper")
    if cell is base or gain is None or paper is None:
        return ""
    if withdrawn(cell, base, scale):
        return UNTESTABLE
    if abs(paper) < recipe.tolerance:
        return "a tie in the paper"
    kept = gain * paper > 0
    if (paper > 0) == (recipe.better == "higher"):  # better than the baseline in the paper
        return "gain kept" if kept else "gain lost"
    return "loss kept" if kept else "no loss here"


def _gain(cell: Cell | None, base: Cell | None, which: str) -> float | None:
    """The difference of two cells; `which` is "ours" or "paper"."""
    a, b = getattr(cell, which, None), getattr(base, which, None)
    return None if a is None or b is None else float(a - b)


def _same_order(recipe: Recipe, a: Cell, b: Cell) -> bool | None:
    """Whether two methods are ordered as in the paper; None if the paper has a tie, or ours has neither value."""
    if a.paper is None or b.paper is None or abs(a.paper - b.paper) < recipe.tolerance or a.absent or b.absent:
        return None
    units = {FIGURES[recipe.figure_of(cell.column)].unit for cell in (a, b)}
    if len(units) > 1 or a.ours is b.ours is None:
        return None
    last = float("-inf") if recipe.better == "higher" else float("inf")  # a method that diverged is behind all others
    ours = [last if cell.ours is None else cell.ours for cell in (a, b)]
    return (ours[0] > ours[1]) == (a.paper > b.paper) and ours[0] != ours[1]
