"""`fedskew tune`: progress while it searches, and the table of what was chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.progress import Progress

from fedskew.cli.console import PROGRESS, console, emit, table
from fedskew.core.settings import choose
from fedskew.evaluation.figures import percent
from fedskew.studies.tune import Goal, Search, search


def show_search(plan: Search, as_json: bool, options: dict[str, Any]) -> None:
    screen = console(as_json)
    with Progress(*PROGRESS, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=plan.budget * len(plan.methods), words="")

        def watch(text: str, number: int, value: float) -> None:
            done = plan.methods.index(text) * plan.budget + number
            bar.update(task, completed=done, words=f"{text} {percent(value)} %")
            if not screen.is_terminal:
                screen.print(f"{text} trial {number} of {plan.budget}: {percent(value)} %")

        try:
            lines = search(plan, watch, **options)
        except KeyboardInterrupt:
            print("fedskew: stopped; the same command goes on from here", file=sys.stderr)
            raise SystemExit(130) from None
    if as_json:
        emit({"budget": plan.budget, "methods": lines})
        return
    rows = [[line["method"], percent(line["accuracy"]), _said(line["values"]), line["file"]] for line in lines]
    title = f"best of {plan.budget} trials each, on validation data"
    screen.print(table(title, ["method", "accuracy %", "chosen", "experiment"], rows))
    screen.print(f"\nnext: fedskew run --config {lines[0]['file']}    with the test data, once")


def _said(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key.removeprefix('method.')}={value:.4g}" for key, value in values.items())


def goal(text: str | None) -> Goal | None:
    choices: dict[str, Goal] = {"global": "global", "personal": "personal"}
    return None if text is None else choose("goal", text, choices)
