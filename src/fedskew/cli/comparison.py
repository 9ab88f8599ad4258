"""What `fedskew compare` prints: progress, what was found, then one line per method, best first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.cli.console import make_screen, make_table, metered, print_json, record_text, resumable
from fedskew.evaluation.cautions import cautions
from fedskew.evaluation.figures import COMPARED, Figure
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.compare import SHOWN, Compared, Line, order, run_methods, summarise, write
from fedskew.studies.ranking import Standing, finding, over_text

# titles of columns that say of which model; the figures' whole words are printed below the table
TITLES = {
    "global": "global",
    "clients": "clients, global model",
    "clients_worst": "worst tenth, global model",
    "personal": "clients, personal models",
    "worst": "worst tenth, personal models",
    "new": "new clients, personal models",
    "balanced": "balanced accuracy",
    "personal_balanced": "balanced accuracy, personal models",
    "f1": "macro F1",
    "auroc": "AUROC",
}
COLUMNS = (*(k for k in SHOWN if k not in ("clients_worst", "personal", "worst", "new")), "clients_worst")
COLUMNS = (*COLUMNS, "personal", "worst", "new")  # each model's mean beside its worst tenth
IMBALANCED = ("balanced", "f1", "auroc", "personal_balanced")  # shown where the test samples are not balanced


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
    figure, baseline, standings = order(runs, goal)
    found = finding(standings, figure, baseline)
    write(out, base, runs, lines)
    if as_json:
        about: dict[str, Any] = {
            "warnings": warnings(runs),
            "goal": figure.key,
            "baseline": baseline,
            "finding": found,
            "directory": str(out),
        }
        print_json({"methods": [line.as_dict() for line in lines]} | about)
        return
    data = base.data if isinstance(base.data, str) else base.data.name
    screen.print(f"\n{found}\n" if found else "", markup=False)
    shared = shared_facts(lines)
    screen.print(make_table(f"{data}, {base.split}{shared}", *columns_and_rows(lines, figure, standings, baseline)))
    screen.print("mean ± standard deviation over seeds; * best of the first column")
    if baseline is not None:
        screen.print(f"over {baseline}: mean difference with the same seeds ± half its 95 % interval, in points")
    for other in shown_figures(lines, figure):
        screen.print(f"  {title(other)}: {other.words}, in {other.unit}" if other.unit else f"  {other.words}")
    for sentence in warnings(runs):
        screen.print(sentence, markup=False)
    for run in runs:
        if run.outcome.failed:
            screen.print(f"{run.method} seed {run.seed} failed: {run.outcome.failed}", markup=False)
    screen.print(f"saved in {out}", markup=False)
    screen.print(
        f"\nnext: fedskew report {out}    curves, confusion matrices, costs and drift on one page", markup=False
    )


def warnings(runs: Sequence[Compared]) -> list[str]:
    """What the table hides, such as a class that is never recognised: of each method the first run that has any."""
    found: dict[str, list[str]] = {}
    for run in runs:
        result = run.outcome.result
        sentences = cautions(result.metrics, result.labels) if result is not None else []
        if severe := [sentence for sentence in sentences if sentence.startswith("warning: ")]:
            found.setdefault(run.method, [f"{s} ({run.method}, seed {run.seed})" for s in severe])
    return [sentence for of_method in found.values() for sentence in of_method]


def shared_facts(lines: Sequence[Line]) -> str:
    """How many seeds and rounds there are, if all methods have the same: `; 3 seeds, 30 rounds`."""
    facts = {key: {getattr(line, key) for line in lines} for key in ("seeds", "rounds")}
    return "".join(f"; {next(iter(v))} {key}" for key, v in facts.items() if len(v) == 1)


def title(figure: Figure) -> str:
    """A figure's column title, which says of which model it is."""
    return TITLES.get(figure.key, figure.key)


def shown_figures(lines: Sequence[Line], goal: Figure) -> list[Figure]:
    """The figures that at least one method has: `goal` first, those for imbalanced samples only if it is one."""
    every = [goal, *(SHOWN[key] for key in COLUMNS if key not in IMBALANCED or goal.key != "global")]
    return [f for f in dict.fromkeys(every) if any(line.figures[f.key].mean is not None for line in lines)]


def columns_and_rows(
    lines: Sequence[Line], goal: Figure, standings: Sequence[Standing], baseline: str | None
) -> tuple[list[str], list[list[Any]]]:
    """The table of a comparison: its columns' titles, and a row per line of `summarise`."""
    first, *others = shown_figures(lines, goal) or [goal]
    costs = [figure for key, figure in COMPARED.items() if key != "bytes_to_target" and key in lines[0].costs]
    differ = [key for key in ("seeds", "rounds") if len({getattr(line, key) for line in lines}) > 1]
    over = [f"over {baseline}"] if baseline is not None and len(lines) > 1 else []
    columns = ["method", *differ, title(first), *over, *map(title, others), *(f.words for f in costs)]
    rows = [
        [line.method, *(getattr(line, key) for key in differ)]
        + [_over_seeds(first, line) + (" *" if line.best else "")]
        + [over_text(standing.over, goal) for _ in over]
        + [_over_seeds(figure, line) for figure in others]
        + [figure.text(line.costs[figure.key]) for figure in costs]
        for line, standing in zip(lines, standings, strict=True)
    ]
    return columns, rows


def _over_seeds(figure: Figure, line: Line) -> str:
    found = line.figures[figure.key]
    return figure.text(found.mean, found.std)
