"""Several methods on one data set and split, with the same seeds and cohorts, in one table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import ACCURACIES, COMPARED, FIGURES, Figure
from fedskew.evaluation.rounds import to_target
from fedskew.experiment.config import Experiment, method_of
from fedskew.experiment.result import Result
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.execution import Outcome, execute, file_name
from fedskew.studies.ranking import Standing, baseline_of, common_figure, rank

# the figures of a line, besides the one that methods are ordered by
SHOWN = {key: FIGURES[key] for key in ("balanced", "f1", "auroc", "personal_balanced", *ACCURACIES, "clients_worst")}

JSON = "compare.json"


@dataclass(frozen=True)
class Compared:
    """One run of a comparison."""

    method: str  # as the user wrote it, with its settings: fedprox:mu=0.1
    seed: int
    outcome: Outcome


Watch = Callable[[str, int, Run, Record], None]  # (method, seed, run, record), called after each round


def run_methods(
    base: Experiment, methods: Sequence[str], seeds: Sequence[int], out: Path, watch: Watch, **options: Any
) -> list[Compared]:
    """Run every method with every seed. Finished runs are read, interrupted ones resumed (see `execute`).

    Args:
        base: the experiment; its method and seed are replaced.
        methods: names with settings, as in `fedprox:mu=0.1`.
        seeds: all methods see the same clients and cohorts for the same seed.
        out: the folder of the runs, one directory each.
        watch: called after each round that is run now.
        options: how to run: workers, engine, device, data_dir, track (see `Run`).
    """
    parsed = {text: method_of(text) for text in methods}  # all of them, so that a mistake shows before the first run
    runs = []
    for seed in seeds:
        for text in methods:
            experiment = replace(base, method=parsed[text], seed=seed)
            path = out / f"{file_name(text)}-s{seed}"
            runs.append(Compared(text, seed, execute(experiment, path, partial(watch, text, seed), **options)))
    return runs


def distinct(methods: Sequence[str]) -> list[str]:
    """The methods without repetitions, also in other words: `fedavg fedavg`, `fedprox fedprox:mu=0.01`.

    One run must not count as two. The first way of writing a method is kept.
    """
    kept: dict[str, Method] = {}
    for text in methods:
        method = method_of(text)
        if method not in kept.values():
            kept[text] = method
    return list(kept)


def order(runs: Sequence[Compared], goal: str | None = None) -> tuple[Figure, str | None, list[Standing]]:
    """(the figure that methods are ordered by, the baseline, the methods in order); see studies/ranking.py.

    `goal` is a measure or a figure (see `leading_figure`); None takes the figure that leads.
    """
    done = [(run, run.outcome.result) for run in runs if not run.outcome.failed and run.outcome.result is not None]
    names = list(dict.fromkeys(run.method for run in runs))
    baseline = baseline_of(names)
    metrics = {text: [r.metrics for run, r in done if run.method == text and r.metrics is not None] for text in names}
    figure = common_figure(metrics, baseline, goal)
    values: dict[str, dict[int, float]] = {text: {} for text in names}
    for run, result in done:
        value = figure.read(result)
        if value is not None:
            values[run.method][run.seed] = value
    return figure, baseline, rank(values, figure, baseline)


class OverSeeds(msgspec.Struct, frozen=True):
    """One figure of a method over its seeds."""

    mean: float | None  # None: no run has this figure
    std: float | None  # None: fewer than two runs have it


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison found about one method."""

    method: str  # as the user wrote it
    seeds: int  # runs that finished
    failed: int  # runs that did not
    rounds: int  # of the longest run
    goal: str  # key of the figure that methods are ordered by
    best: bool  # whether the method's mean of it is the best, among two or more methods
    over_baseline: float | None  # mean difference to FedAvg with the same seeds; None: it is FedAvg, or there is none
    over_baseline_margin: float | None  # half the width of its 95 % interval; None: too few seeds
    figures: dict[str, OverSeeds]  # by key of `FIGURES`: the goal, and those of `SHOWN`
    costs: dict[str, float | None]  # by key of `COMPARED`: means over seeds; those to target only if one was given

    def as_dict(self) -> dict[str, Any]:
        """The line as in compare.json and compare.csv: a figure is `key` and `key_std`."""
        flat = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("figures", "costs")}
        for key, figure in self.figures.items():
            flat |= {key: figure.mean, f"{key}_std": figure.std}
        return flat | self.costs


def line_from_dict(line: dict[str, Any]) -> Line:
    """The line that `Line.as_dict` gave; raises ValueError if a value is missing or of another type."""
    figures = {key: {"mean": line[key], "std": line[f"{key}_std"]} for key in FIGURES if f"{key}_std" in line}
    costs = {key: line[key] for key in COMPARED if key in line}
    known = {key: value for key, value in line.items() if key in Line.__struct_fields__}
    return msgspec.convert(known | {"figures": figures, "costs": costs}, Line)


def summarise(runs: Sequence[Compared], target: float | None, goal: str | None = None) -> list[Line]:
    """One line per method, best first: each figure's mean and standard deviation over seeds, and the mean costs.

    `goal` is the figure that methods are ordered by, see `order`; `target` is a value of it, from 0 to 1, and None
    leaves rounds and bytes to target out. Failed runs are counted, not averaged.
    """
    figure, _, standings = order(runs, goal)
    return [_line(standing, runs, figure, target, goal) for standing in standings]


def _line(standing: Standing, runs: Sequence[Compared], figure: Figure, target: float | None, goal: str | None) -> Line:
    every = [run.outcome for run in runs if run.method == standing.method]
    done = [outcome for outcome in every if not outcome.failed]
    results = [outcome.result for outcome in done if outcome.result is not None]
    costs: dict[str, float | None] = {}
    if target is not None:
        reached = [to_target(outcome.records, target, goal) for outcome in done if standing.values]
        costs["rounds_to_target"] = _mean_or_none([r["rounds"] for r in reached])
        costs["bytes_to_target"] = _mean_or_none([r["bytes"] for r in reached])
    costs["bytes"] = _mean_or_none([result.bytes_up + result.bytes_down for result in results])
    costs["client_seconds"] = _mean_or_none([result.client_seconds for result in results])
    costs["server_seconds"] = _mean_or_none([result.server_seconds for result in results])
    return Line(
        method=standing.method,
        seeds=len(done),
        failed=len(every) - len(done),
        rounds=max((result.rounds for result in results), default=0),
        goal=figure.key,
        best=standing.best,
        over_baseline=standing.over.mean if standing.over is not None else None,
        over_baseline_margin=standing.over.margin if standing.over is not None else None,
        figures={key: _over_seeds(shown, results) for key, shown in ({figure.key: figure} | SHOWN).items()},
        costs=costs,
    )


def _over_seeds(figure: Figure, results: Sequence[Result]) -> OverSeeds:
    values = [v for result in results if (v := figure.read(result)) is not None]
    return OverSeeds(statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean if every seed has a value, else None."""
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def write(out: Path, base: Experiment, runs: Sequence[Compared], lines: Sequence[Line]) -> None:
    """Write compare.json (settings, a line per method, an entry per run) and compare.csv (the lines) to `out`."""
    entries = [
        {"method": run.method, "seed": run.seed, "failed": run.outcome.failed}
        | {key: getattr(run.outcome.result, key, None) for key in ("accuracy", "digest", "metrics")}
        for run in runs
    ]
    settings = {key: value for key, value in base.as_dict().items() if key not in ("method", "seed")}
    rows = [line.as_dict() for line in lines]
    content = msgspec.json.encode({"settings": settings, "methods": rows, "runs": entries})
    write_atomically(out / JSON, msgspec.json.format(content, indent=1) + b"\n")
    with (out / "compare.csv").open("w", newline="") as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(file, fieldnames=list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)


def read_lines(out: Path) -> list[Line]:
    """The lines of the comparison that `write` wrote to `out`; UsageError if there is none or it is damaged."""
    try:
        return [line_from_dict(line) for line in msgspec.json.decode((out / JSON).read_bytes())["methods"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{out / JSON} cannot be read: {error}.") from None
