"""Several methods on one data set and split, with the same seeds and cohorts, in one table."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES, figure, to_target
from fedskew.experiment.config import Experiment, from_dict, method_of, read_toml
from fedskew.experiment.run import Run, closing
from fedskew.federation.protocol import QuorumLost, Record


def carry_out(
    base: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    watch: Callable[[str, int, Run, Record], None],
    **options: Any,
) -> list[dict[str, Any]]:
    """Run what is missing, take up what was cut off; one row a run. A changed setting is not mixed with old results."""
    made = {text: method_of(text) for text in methods}  # mistakes before the first run
    rows = []
    for seed in seeds:
        for text in methods:
            experiment = replace(base, method=made[text], seed=seed)
            path = out / f"{slug(text)}-s{seed}"
            row = carry(experiment, path, partial(watch, text, seed), **options)
            rows.append({**row, "method": text, "seed": seed})  # the row's name of the method, with its settings
    return rows


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text.replace("=", "")).strip("-")


def carry(experiment: Experiment, path: Path, watch: Callable[[Run, Record], None], **options: Any) -> dict[str, Any]:
    """One run carried out or taken up, as a row: its closing figures, records, and why it failed ("": it did not)."""
    run, failed = open_run(experiment, path, **options), ""
    try:
        for record in run:
            watch(run, record)
        result = run.result
    except QuorumLost as lost:  # it diverged, say: a result too, and no reason not to see the others
        failed = str(lost)
        result = closing(experiment, run.records) if run.records else {}
    return {**result, "directory": str(path), "failed": failed, "records": run.records}


def open_run(experiment: Experiment, path: Path, **options: Any) -> Run:
    settings = path / "settings.toml"
    if not settings.exists():
        return Run(experiment, out=path, **options)
    if from_dict(read_toml(settings)).as_dict() != experiment.as_dict():
        raise UsageError(f"{path} holds a run with other settings; give another --out or remove it.")
    return Run(experiment, out=path, resume=True, **options)


def summarise(rows: Sequence[dict[str, Any]], target: float | None) -> list[dict[str, Any]]:
    """One line a method: mean and spread over seeds of each figure, and what it cost."""
    lines = []
    for text in dict.fromkeys(row["method"] for row in rows):
        every = [row for row in rows if row["method"] == text]
        runs = [row for row in every if not row["failed"]]
        line: dict[str, Any] = {"method": text, "seeds": len(runs), "failed": len(every) - len(runs)}
        line["rounds"] = max((row["rounds"] for row in runs), default=0)
        for word, place in FIGURES.items():
            values = [v for run in runs if (v := figure(run, place)) is not None]
            line[word] = statistics.mean(values) if values else None
            line[f"{word}_std"] = statistics.stdev(values) if len(values) > 1 else None
        if target is not None:
            reached = [to_target(run["records"], target) for run in runs]
            line["rounds_to_target"] = _mean_or_none([r["rounds"] for r in reached])
            line["bytes_to_target"] = _mean_or_none([r["bytes"] for r in reached])
        line["bytes"] = _mean_or_none([run["bytes_up"] + run["bytes_down"] for run in runs])
        line["client_seconds"] = _mean_or_none([run["client_seconds"] for run in runs])
        line["server_seconds"] = _mean_or_none([run["server_seconds"] for run in runs])
        lines.append(line)
    return lines


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    """A mean only if every seed got there."""
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def write(out: Path, base: Experiment, rows: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> None:
    """compare.json (settings, a line a method, a row a run) and compare.csv beside the runs."""
    kept = ("method", "seed", "failed", "accuracy", "digest", "metrics")
    runs = [{key: row.get(key) for key in kept} for row in rows]
    settings = {key: value for key, value in base.as_dict().items() if key not in ("method", "seed")}
    text = json.dumps({"settings": settings, "methods": list(lines), "runs": runs}, indent=1)
    write_atomically(out / "compare.json", (text + "\n").encode())
    with (out / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
