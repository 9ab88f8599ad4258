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

from fedskew.checkpoint import write_atomically
from fedskew.evaluate import to_target
from fedskew.experiment import Experiment, from_dict, read_toml
from fedskew.federation.loop import QuorumLost, Record
from fedskew.method import Method
from fedskew.methods import REGISTRY
from fedskew.runner import Run, closing
from fedskew.settings import Mistake, build, choose, parse

FIGURES = {  # what is tabled of a run: word -> where it stands in the last round's metrics
    "global": ("global", "accuracy"),
    "head": ("global", "head"),
    "middle": ("global", "middle"),
    "tail": ("global", "tail"),
    "ensemble": ("ensemble", "accuracy"),
    "clients": ("clients", "global", "mean"),
    "personal": ("clients", "personal", "mean"),
    "worst": ("clients", "personal", "worst_decile"),
    "new": ("new", "personal", "mean"),
}


def method_of(text: str) -> Method:
    """`fedprox:mu=0.1` -> FedProx(mu=0.1)."""
    steps = parse(text, "method")
    if len(steps) > 1:
        raise Mistake(f"method '{text}' has more than one part; write name:field=value,...")
    name, options = steps[0]
    values: dict[str, Any] = {key: _listed(value) for key, value in options.items()}
    return build(choose("method", name, REGISTRY), values, f"method {name}")


def _listed(value: str) -> Any:
    """5-5-5 is a tuple of numbers, since a comma ends an option."""
    parts = value.split("-")
    return [int(p) for p in parts] if len(parts) > 1 and all(p.isdigit() for p in parts) else value


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
        raise Mistake(f"{path} holds a run with other settings; give another --out or remove it.")
    return Run(experiment, out=path, resume=True, **options)


def figure(result: dict[str, Any], place: Sequence[str]) -> float | None:
    value: Any = result["metrics"]
    for key in place:
        value = value.get(key) if value else None
    return None if value is None else float(value)


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
