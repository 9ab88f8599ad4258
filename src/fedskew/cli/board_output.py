"""What `fedskew board` prints and writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from fedskew.cli.console import make_screen, make_table, metered, print_json, resumable
from fedskew.core.settings import UsageError, unknown
from fedskew.evaluation.figures import FIGURES, bytes_text, percent
from fedskew.studies.board import evidence as evidence_module
from fedskew.studies.board.evidence import Row, Task, read_tasks, shipped, write_task
from fedskew.studies.board.metering import Meter
from fedskew.studies.board.running import all_methods, finished, run_board
from fedskew.studies.board.statistics import make_task, ordered, tally
from fedskew.studies.board.tasks import load_tasks
from fedskew.studies.compare import distinct
from fedskew.studies.provenance import ROOT
from fedskew.studies.ranking import BASELINE

COLUMNS = {  # figures of `board show`, and their short titles
    "f1": "macro F1",
    "tail": "tail",
    "personal": "own mean",
    "worst": "worst tenth",
    "new": "new clients",
}


def own_evidence() -> Path | None:
    """The folder of the evidence in a working copy; None if the package is installed."""
    return Path(evidence_module.__file__).parent / "evidence" if (ROOT / ".git").exists() else None


@contextmanager
def only_errors() -> Iterator[None]:
    """Leave out a method's warnings, which would be repeated with every seed."""
    logger = logging.getLogger("fedskew")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def run_and_show(
    names: Sequence[str],
    methods: Sequence[str],
    out: Path,
    evidence: Path | None,
    *,
    partial: bool,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Run the board (see `run_board`), write its tasks, and print what each came to."""
    tasks, chosen = load_tasks(names), distinct(methods) or all_methods()
    wanted = all_methods()
    screen = make_screen(as_json)
    made: list[Task] = []
    folder = evidence or own_evidence()

    with only_errors(), resumable("the same command"), metered(screen, len(chosen), unit="run") as bar:

        def say(done: float, total: int, seconds: float, text: str, at: str) -> None:
            bar.bar.update(bar.task, total=total)
            line = f"run {min(int(done) + 1, total)} of {total}, about {time_text(seconds)} left: {text}, {at}"
            bar.update(done, f"{text}, {at}; about {time_text(seconds)} left", line)

        meter = Meter(tasks, len(chosen), say)
        ready = {}
        for task, tried in run_board(tasks, chosen, out, meter, workers=1, data_dir=data_dir):
            ready[tried.method] = tried
            text = f"{task.name} {tried.method} finished, learning rate {tried.rate or 'none'}"
            left = f"about {time_text(meter.seconds_left())} left"
            bar.update(meter.done, text, f"run {meter.done} of {meter.total}, {left}: {text}", always=True)
            if len(ready) < len(chosen):
                continue
            others = [finished(task, name, out / task.name) for name in wanted if name not in ready]
            done = make_task(task, [*ready.values(), *others], wanted)
            write_task(done, out)
            if folder is not None and (partial or not done.missing):
                write_task(done, folder)
            made.append(done)
            ready = {}
    if as_json:
        print_json({"tasks": [msgspec.to_builtins(task, str_keys=True) for task in made], "directory": str(out)})
        return
    for done in made:
        print_task(done, screen)
        state = f"{len(done.missing)} methods are missing" if done.missing else "the task is whole"
        screen.print(f"{state}; saved in {out / f'{done.name}.json'}\n", markup=False)


def time_text(seconds: float) -> str:
    """Seconds for people: 40 s, 12 min, 3.5 h."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def chosen_tasks(names: Sequence[str], evidence: Path | None) -> list[Task]:
    """The tasks with these names that have evidence (all of them if there is no name); UsageError if there is none."""
    tasks = {task.name: task for task in (read_tasks(evidence) if evidence is not None else shipped())}
    if not tasks:
        raise UsageError(f"there is no evidence in {evidence or 'the package'}: run `fedskew board run` first.")
    for name in names:
        if name not in tasks:
            raise unknown("task with evidence", name, tasks)
    return [tasks[name] for name in dict.fromkeys(names or tasks)]


def show(names: Sequence[str], evidence: Path | None, as_json: bool) -> None:
    """Print tasks: all in one overview, or each named one as a table."""
    tasks = chosen_tasks(names, evidence)
    if as_json:
        print_json({"tasks": [msgspec.to_builtins(task, str_keys=True) for task in tasks], "tally": tally(tasks)})
        return
    screen = make_screen(as_json)
    if not names:
        print_overview(tasks, screen)
    for task in tasks if names else ():
        print_task(task, screen)


def print_overview(tasks: Sequence[Task], screen: Console) -> None:
    """Methods x tasks: points over tuned FedAvg, and how often each won, tied and lost."""
    counts = tally(tasks)
    rows = {(task.name, row.method): row for task in tasks for row in task.rows}

    def cell(task: Task, method: str) -> str:
        row = rows.get((task.name, method))
        if row is None:
            return ""
        if method == BASELINE:
            return f"{percent(row.value)} %"
        failed = f" ({row.failed} of {row.failed + row.seeds} diverged)" if row.failed and row.seeds else ""
        return over_text(row) + (" =" if row.tied else "") + failed

    table = [[m, *(cell(t, m) for t in tasks), "{win}/{tie}/{loss}".format(**counts[m])] for m in ordered(tasks)]
    columns = ["method", *(t.name + ("" if t.ranked else " (not ranked)") for t in tasks), "win/tie/loss"]
    screen.print(make_table("points over tuned FedAvg, ± half the 95 % interval over seeds", columns, table))
    screen.print(f"{BASELINE}: its accuracy. = cannot be told apart from the best of the task.")
    for task in tasks:
        screen.print(f"  {task.name}: {task.title}", markup=False)
    for task in tasks:
        print_cautions(task, screen)


def over_text(row: Row) -> str:
    """A row's difference to FedAvg in points: `+2.10 ±0.80`; why there is none otherwise."""
    if row.over is None:
        return "diverged" if row.failed and not row.seeds else "-" if row.seeds else "cannot run"
    return f"{100 * row.over:+.2f}" + (f" ±{100 * row.margin:.2f}" if row.margin is not None else "")


def print_task(task: Task, screen: Console) -> None:
    """The table of one task, best first."""
    shown = {k: v for k, v in COLUMNS.items() if any(row.figures.get(k) is not None for row in task.rows)}
    goal = FIGURES[task.goal]
    columns = ["method", "lr", goal.key, "last five", "over fedavg", *shown.values()]
    columns += ["own over fedavg", "bytes to fedavg", "seconds to fedavg", "cost", "server sees"]
    rows = [
        [
            row.method + (" =" if row.tied else ""),
            f"{row.lr:g}" if row.lr else "-",
            percent(row.value),
            percent(row.last_five),
            over_text(row) if row.method != BASELINE else "",
            *(percent(row.figures.get(key)) for key in shown),
            own_text(row),
            bytes_text(v) if (v := row.costs.get("bytes_to_fedavg")) is not None else "-",
            f"{v:.1f}" if (v := row.costs.get("seconds_to_fedavg")) is not None else "-",
            f"{v:.1f}x" if (v := row.costs.get("times_fedavg")) is not None else "-",
            server_text(row),
        ]
        for row in task.rows
    ]
    screen.print(make_table(f"{task.name}: {task.title}; {task.seeds} seeds, {goal.words} in %", columns, rows))
    screen.print(
        "= cannot be told apart from the best; own over fedavg: 95 % interval over seeds and clients, in points"
    )
    curve = " ".join(f"{100 * value:.1f}" for value in task.curve.mean)
    screen.print(f"fedavg after rounds {', '.join(map(str, task.curve.rounds))}: {curve}", markup=False)
    print_cautions(task, screen)


def own_text(row: Row) -> str:
    """The difference of clients' own models to FedAvg's, with the interval over clients: `+4.1 [+2.0, +6.3]`."""
    if row.own_over is None or row.own_low is None or row.own_high is None:
        return "-"
    return f"{100 * row.own_over:+.1f} [{100 * row.own_low:+.1f}, {100 * row.own_high:+.1f}]"


def server_text(row: Row) -> str:
    """What a method asks for: what the server sees, public data, state of clients."""
    parts = ["sums" if row.sums_only else "each client's model"]
    return ", ".join(parts + ["public data"] * row.public + ["client state"] * row.state)


def print_cautions(task: Task, screen: Console) -> None:
    """What a reader of the table must know: FedAvg has not converged, methods are missing, runs failed."""
    if task.unsettled:
        screen.print(f"warning: {task.name}: {task.unsettled}; methods are not ranked there.", markup=False)
    if task.missing:
        screen.print(f"note: {task.name} is not whole: {', '.join(task.missing)} not finished.", markup=False)
    for row in task.rows:
        if row.note:
            screen.print(f"note: {task.name}/{row.method}: {row.note}", markup=False)


def write_page(out: Path, evidence: Path | None, as_json: bool) -> None:
    """Write the board's page."""
    from fedskew.report.board import write_board

    write_board(chosen_tasks([], evidence), out)
    facts: dict[str, Any] = {"file": str(out), "bytes": out.stat().st_size}
    if as_json:
        print_json(facts)
    else:
        make_screen(as_json).print(f"{out} ({bytes_text(out.stat().st_size)})", markup=False)


def verify(cell: str, evidence: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Run a cell again, say whether it came out the same, and end with code 1 if not."""
    from fedskew.studies.board.verification import verify_cell

    found = verify_cell(cell, chosen_tasks([], evidence), workers=1, data_dir=data_dir)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        screen = make_screen(as_json)
        if found.same:
            screen.print(f"{cell}: the same, bit for bit: {percent(found.value)} %, digest {found.digest[:16]}")
        else:
            now = found.failed or f"{percent(found.value_now)} %, digest {found.digest_now[:16]}"
            screen.print(
                f"{cell}: differs. The board says {percent(found.value)} %, digest {found.digest[:16]}; now: {now}",
                markup=False,
            )
            for change in found.differs:
                screen.print(f"  {change}: results may not be bit-identical", markup=False)
    if not found.same:
        raise SystemExit(1)
