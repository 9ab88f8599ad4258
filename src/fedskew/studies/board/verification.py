"""Runs a cell of the board again and compares it with what the evidence says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fedskew.core.settings import UsageError, unknown
from fedskew.experiment.run_directory import versions
from fedskew.studies.board.cells import Watch, do_cell
from fedskew.studies.board.evidence import Row, Task
from fedskew.studies.board.tasks import TaskFile, load_task
from fedskew.studies.provenance import this_cpu


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One cell as the evidence has it and as it came out now."""

    cell: str  # t6/fedprox/3
    same: bool  # whether the digests agree, bit for bit, and the figure with them
    value: float | None  # of the evidence
    value_now: float | None
    digest: str
    digest_now: str
    failed: str = ""  # why it did not finish now
    differs: list[str] = []  # what else differs from when the evidence was made, in words: CPU, versions, settings


def find_row(cell: str, tasks: Sequence[Task]) -> tuple[Task, Row, int]:
    """The task, row and seed that `t6/fedprox/3` names; anything else is a `UsageError`."""
    parts = cell.split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise UsageError(f"cell '{cell}' is invalid: expected task/method/seed, as in t6/fedprox/3.")
    name, method, seed = parts[0], parts[1], int(parts[2])
    by_name = {task.name: task for task in tasks}
    if name not in by_name:
        raise unknown("task with evidence", name, by_name)
    rows = {row.method: row for row in by_name[name].rows}
    if method not in rows:
        raise unknown(f"method with evidence on task {name}", method, rows)
    if seed not in rows[method].digests:
        known = ", ".join(map(str, sorted(rows[method].digests))) or "none"
        raise UsageError(f"{method} has no finished run with seed {seed} on task {name}: finished are {known}.")
    return by_name[name], rows[method], seed


def verify_cell(cell: str, tasks: Sequence[Task], watch: Watch | None = None, **options: Any) -> Verified:
    """Run the cell `task/method/seed` of the evidence again. `options` say how to run (see `Run`)."""
    task, row, seed = find_row(cell, tasks)
    source = load_task(task.name)
    made = do_cell(source.cell(row.method, row.lr, seed), None, watch, **options)
    now = made.curve[-1].figures[task.goal] if made.curve else None
    stored = row.values.get(seed)
    return Verified(
        cell=cell,
        same=made.digest == row.digests[seed] and now == stored,
        value=stored,
        value_now=now,
        digest=row.digests[seed],
        digest_now=made.digest,
        failed=made.failed,
        differs=_changes(task, source),
    )


def _changes(task: Task, source: TaskFile) -> list[str]:
    """What has changed, of all that a result depends on, since the evidence was written."""
    found = [] if task.cpu == this_cpu() else [f"the CPU is {this_cpu()}, not {task.cpu}"]
    now = versions()
    found += [f"{name} is {now.get(name)}, not {was}" for name, was in task.versions.items() if now.get(name) != was]
    settings = msgspec.to_builtins(source.settings())
    return found + (["the task's settings have changed"] if task.settings != settings else [])
