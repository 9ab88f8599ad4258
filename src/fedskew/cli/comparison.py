"""What `fedskew compare` prints: progress, then one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.cli.console import make_screen, make_table, metered, print_json, record_text, resumable
from fedskew.evaluation.figures import ACCURACIES, COMPARED, FIGURES, Figure
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.compare import run_methods, summarise, write


def show_comparison(
    base: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    target: float | None,
    as_json: bool,
    options: dict[str, Any],
    goal: str | None = None,
) -> None:
    """Run the comparison (see `run_methods`), write its files to `out`, and print the table or the JSON object.

    `goal` is the figure that counts (None: the leading one), `target` the value of it to report rounds and bytes to.
    """
    screen = make_screen(as_json)
    total = base.rounds * len(methods) * len(seeds)
    with resumable("the same command"), metered(screen, total) as meter:

        def watch(text: str, seed: int, run: Run, record: Record) -> None:
            position = seeds.index(seed) * len(methods) + list(methods).index(text)
            done = (position + record.number / run.rounds) * base.rounds
            line = f"{text} seed {seed} round {record.number}/{run.rounds} {record_text(record)}"
            always = record.number == run.rounds
            meter.update(done, f"{text} seed {seed} {record_text(record)}", line, always=always)

        runs = run_methods(base, methods, seeds, out, watch, **options)
    lines = summarise(runs, target, goal)
    write(out, base, runs, lines)
    if as_json:
        print_json({"methods": lines, "directory": str(out)})
        return
    title = f"{base.data if isinstance(base.data, str) else base.data.name}, {base.split}"
    screen.print(make_table(title, *columns_and_rows(lines)))
    screen.print("accuracy in %, mean and standard deviation over seeds:")
    for figure in shown_accuracies(lines):
        screen.print(f"  {figure.key:<10}{figure.words}")
    for run in runs:
        if run.outcome.failed:
            screen.print(f"{run.method} seed {run.seed} failed: {run.outcome.failed}")
    screen.print(f"saved in {out}")


def shown_accuracies(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """The figures that at least one method has: what counts first (see `summarise`), then the accuracies."""
    keys = dict.fromkeys([*(line["goal"] for line in lines if line["goal"]), *ACCURACIES])
    return [FIGURES[key] for key in keys if any(line.get(key) is not None for line in lines)]


def columns_and_rows(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The table of a comparison: its columns' titles, and a row per line of `summarise`."""
    accuracies = shown_accuracies(lines)
    costs = [figure for key, figure in COMPARED.items() if key != "bytes_to_target" and key in lines[0]]
    columns = ["method", "seeds", "rounds", *(f.key for f in accuracies), *(f.words for f in costs)]
    rows = [
        [line["method"], line["seeds"], line["rounds"]]
        + [figure.text(line.get(figure.key), line.get(f"{figure.key}_std")) for figure in accuracies]
        + [figure.text(line[figure.key]) for figure in costs]
        for line in lines
    ]
    return columns, rows
