"""What `fedskew tune` prints: progress over the trials, then the best values of each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedskew.cli.console import make_screen, make_table, metered, print_json, resumable
from fedskew.evaluation.figures import percent
from fedskew.studies.tune import Search, search


def show_search(plan: Search, as_json: bool, options: dict[str, Any]) -> None:
    """Run the search and print the best values of each method, or the JSON object."""
    screen = make_screen(as_json)
    total = plan.budget * len(plan.methods)
    with resumable("the same command"), metered(screen, total, unit="trial") as meter:

        def watch(text: str, number: int, value: float) -> None:
            done = plan.methods.index(text) * plan.budget + number
            line = f"{text} trial {number} of {plan.budget}: {percent(value)} %"
            meter.update(done, f"{text} {percent(value)} %", line, always=True)

        lines = search(plan, watch, **options)
    if as_json:
        print_json({"budget": plan.budget, "methods": lines})
        return
    rows = [[line["method"], percent(line["accuracy"]), values_text(line["values"]), line["file"]] for line in lines]
    title = f"best of {plan.budget} trials each, on validation data"
    screen.print(make_table(title, ["method", "accuracy %", "chosen", "experiment"], rows))
    screen.print(f"\nnext: fedskew run --config {lines[0]['file']}    evaluate it once on the test data")


def values_text(values: Mapping[str, float]) -> str:
    """Chosen values as text: `lr=0.05, mu=0.1`."""
    return ", ".join(f"{key.removeprefix('method.')}={value:.4g}" for key, value in values.items())
