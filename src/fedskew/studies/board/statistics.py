"""From the runs of a task to its rows: means, paired differences, who cannot be told apart, costs to FedAvg's level."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy import stats

from fedskew.core.method import Method
from fedskew.evaluation.figures import FIGURES, at_least_as_good
from fedskew.experiment.config import method_of
from fedskew.experiment.costs import measure_costs
from fedskew.experiment.run_directory import versions
from fedskew.studies.board.cells import KEPT, Cell
from fedskew.studies.board.evidence import Curve, Row, Task
from fedskew.studies.board.running import Tried
from fedskew.studies.board.tasks import TaskFile
from fedskew.studies.convergence import last_mean, unsettled_curve
from fedskew.studies.provenance import this_commit, this_cpu
from fedskew.studies.ranking import BASELINE, LEVEL, Difference, Standing, rank

RESAMPLES = 2000  # of the bootstrap over clients
Cells = Mapping[int, Cell]  # by seed, of runs that finished


def make_task(task: TaskFile, tried: Sequence[Tried], wanted: Sequence[str]) -> Task:
    """The task's evidence from what is finished; `wanted` are the methods that it needs to be whole."""
    done = {each.method: each for each in tried if each.whole(task)}
    cells = {name: {s: c for s, c in each.cells.items() if not c.failed} for name, each in done.items()}
    base = cells.get(BASELINE, {})
    curve, unsettled = baseline_curve(task, base)
    values = {name: {seed: _last(cell, task.goal) for seed, cell in of.items()} for name, of in cells.items()}
    known = {name: {seed: v for seed, v in of.items() if v is not None} for name, of in values.items()}
    standings = rank(known, FIGURES[task.goal], BASELINE if base else None)
    tied = same_as_best(known, task.goal) if not unsettled else set()
    rows = [_row(task, done[each.method], each, cells, base, not unsettled, tied) for each in standings]
    every = [cell for of in cells.values() for cell in of.values()]
    return Task(
        name=task.name,
        title=task.title,
        why=task.why,
        goal=task.goal,
        skew=base[min(base)].skew if base else {},
        commit=", ".join(dict.fromkeys(cell.commit for cell in every)) or this_commit(),
        cpu=", ".join(dict.fromkeys(cell.cpu for cell in every)) or this_cpu(),
        rows=rows,
        seeds=task.seeds,
        rates=list(task.rates),
        settings=task.settings(),
        versions=versions(),
        missing=[name for name in wanted if name not in done],
        unsettled=unsettled,
        curve=curve,
    )


def baseline_curve(task: TaskFile, base: Cells) -> tuple[Curve, str]:
    """FedAvg's curve, and why it has not converged ("": it has)."""
    if not base:
        return Curve(), f"{BASELINE} has no finished run"
    curves = {seed: [p.figures[task.goal] or 0.0 for p in cell.curve] for seed, cell in base.items()}
    mean = [statistics.mean(at) for at in zip(*curves.values(), strict=False)]
    first = next(iter(base.values()))
    unsettled = unsettled_curve(mean, first.classes)
    why = f"{BASELINE} {unsettled}" if unsettled else ""
    return Curve(rounds=[p.round for p in first.curve], mean=mean, seeds=curves), why


def same_as_best(values: Mapping[str, Mapping[int, float]], goal: str) -> set[str]:
    """The best method and those whose paired difference to it has an interval that includes 0, or no interval.

    Controls that do not federate and methods with public data do not compete; they are compared with the best.
    """
    competing = {name: of for name, of in values.items() if of and competes(name)}
    if not competing:
        return set()
    best = rank(competing, FIGURES[goal], None)[0].method
    beside = rank(competing, FIGURES[goal], best)
    return {best} | {s.method for s in beside if s.over is not None and not s.over.certain}


def competes(method: str) -> bool:
    """Whether a method may be called the best: it federates, and needs no public data."""
    kind = method_of(method)
    return not kind.public and not is_control(kind)


def is_control(method: Method) -> bool:
    """Whether nothing is federated: clients alone, the data of all in one place, or the server's public data alone."""
    return method.pooled or type(method).__name__ in ("Local", "PublicOnly")


def _row(
    task: TaskFile,
    tried: Tried,
    standing: Standing,
    cells: Mapping[str, Cells],
    base: Cells,
    ranked: bool,
    tied: set[str],
) -> Row:
    name, own = standing.method, cells[standing.method]
    method = method_of(name)
    failed = [cell.failed for cell in tried.cells.values() if cell.failed]
    notes = failed or [trial.failed for trial in tried.trials.values() if trial.failed and tried.rate is None]
    gap, low, high = own_gap(own, base) if name != BASELINE else (None, None, None)
    return Row(
        method=name,
        lr=tried.rate or 0.0,
        seeds=len(own),
        failed=len(failed),
        value=standing.mean,
        std=standing.std,
        values=dict(standing.values),
        last_five=mean_or_none([_last_five(cell, task.goal) for cell in own.values()]),
        over=standing.over.mean if standing.over else None,
        margin=standing.over.margin if standing.over else None,
        outcome=outcome(standing.over, task.goal) if ranked and not failed else "loss" if ranked and failed else "",
        tied=name in tied,
        own_over=gap.mean if gap else None,
        own_margin=gap.margin if gap else None,
        own_low=low,
        own_high=high,
        figures={key: mean_or_none([_last(cell, key) for cell in own.values()]) for key in KEPT},
        costs=costs(task, own, base),
        digests={seed: cell.digest for seed, cell in own.items()},
        rates={f"{rate:g}": trial.value for rate, trial in tried.trials.items()},
        note=notes[0] if notes else "",
        public=method.public,
        sums_only=method.sums_only,
        state=keeps_state(name),
        control=is_control(method),
    )


def outcome(over: Difference | None, goal: str) -> Literal["win", "tie", "loss", ""]:
    """What a difference to FedAvg says; "" without one, or without an interval."""
    if over is None or over.margin is None:
        return ""
    if not over.certain:
        return "tie"
    return "win" if (over.mean > 0) == (FIGURES[goal].better == "higher") else "loss"


def own_gap(own: Cells, base: Cells) -> tuple[Difference | None, float | None, float | None]:
    """Accuracy of clients' own models less FedAvg's: the difference paired by seed; its interval over clients.

    The interval is a bootstrap over pairs of a seed and a client, with seeds as they are.
    """
    values = {"own": {s: statistics.mean(c.own.values()) for s, c in own.items() if c.own}}
    values[BASELINE] = {s: statistics.mean(c.own.values()) for s, c in base.items() if c.own}
    gap = next(s.over for s in rank(values, FIGURES["personal"], BASELINE) if s.method == "own")
    pairs = [
        cell.own[client] - base[seed].own[client]
        for seed, cell in own.items()
        if seed in base
        for client in cell.own.keys() & base[seed].own.keys()
    ]
    if len(pairs) < 2:
        return gap, None, None
    if len(set(pairs)) == 1:  # no spread to resample: FedAvg under another name
        return gap, pairs[0], pairs[0]
    found = stats.bootstrap(
        (np.sort(pairs),),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return gap, float(found.low), float(found.high)


def costs(task: TaskFile, own: Cells, base: Cells) -> dict[str, float | None]:
    """Mean costs over seeds, and what it took to reach FedAvg's level: the mean of its last five evaluations.

    Costs to a level are None if a seed does not reach it.
    """
    found: dict[str, float | None] = {
        key: mean_or_none([cell.costs[key] for cell in own.values()])
        for key in ("bytes", "client_seconds", "server_seconds")
    }
    reached = [
        _reached(cell, _last_five(base[seed], task.goal), task.goal) for seed, cell in own.items() if seed in base
    ]
    for i, key in enumerate(("rounds_to_fedavg", "bytes_to_fedavg", "seconds_to_fedavg")):
        found[key] = mean_or_none([None if each is None else each[i] for each in reached])
    total = mean_or_none([_seconds(cell) for cell in own.values()])
    beside = mean_or_none([_seconds(cell) for cell in base.values()])
    found["times_fedavg"] = total / beside if total is not None and beside else None
    return found


def _seconds(cell: Cell) -> float:
    return cell.costs["client_seconds"] + cell.costs["server_seconds"]


def _reached(cell: Cell, level: float | None, goal: str) -> tuple[float, float, float] | None:
    """(round, bytes, seconds) at the first evaluation that is at least at the level; None if there is none."""
    for point in cell.curve:
        value = point.figures[goal]
        if level is not None and value is not None and at_least_as_good(value, level, FIGURES[goal].better):
            return point.round, point.bytes, point.seconds
    return None


def _last(cell: Cell, key: str) -> float | None:
    return cell.curve[-1].figures[key] if cell.curve else None


def _last_five(cell: Cell, key: str) -> float | None:
    values = [v for point in cell.curve if (v := point.figures[key]) is not None]
    return last_mean(values) if values else None


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean if there are values and every one is known, else None."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


@cache
def keeps_state(method: str) -> bool:
    """Whether a client must keep tensors from one round to the next, measured in two rounds on random samples."""
    made = method_of(method)
    return any(measure_costs(replace(made, **made.quick)).client.values())


def tally(tasks: Sequence[Task]) -> dict[str, dict[str, int]]:
    """How often each method won, tied and lost against FedAvg, over the tasks that are ranked."""
    found: dict[str, Any] = {}
    for task in tasks:
        for row in task.rows:
            counts = found.setdefault(row.method, {"win": 0, "tie": 0, "loss": 0})
            if task.ranked and row.outcome:
                counts[row.outcome] += 1
    return found


def ordered(tasks: Sequence[Task], own: bool = False) -> list[str]:
    """The methods of all tasks: FedAvg, then by wins less losses on the ranked tasks, then by the mean difference.

    Those that are not compared on any task are last. By the tasks' figures, or by clients' `own` models, where a win or
    a loss is an interval over seeds without 0.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for task in tasks:
        for row in task.rows:
            over, margin = (row.own_over, row.own_margin) if own else (row.over, row.margin)
            sure = row.failed or (over is not None and margin is not None and abs(over) > margin)
            sign = 1 if own or FIGURES[task.goal].better == "higher" else -1
            gap = -1.0 if row.failed else sign * (over or 0.0)
            each = found.setdefault(row.method, [])
            if task.ranked and (row.failed or over is not None):
                each.append(((gap > 0) - (gap < 0) if sure else 0, gap))

    def key(method: str) -> tuple[bool, bool, int, float, str]:
        each = found[method]
        mean = statistics.mean(gap for _, gap in each) if each else 0.0
        return method != BASELINE, not each, -sum(points for points, _ in each), -mean, method

    return sorted(found, key=key)
