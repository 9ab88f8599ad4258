"""What the commands print: progress, tables, one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedskew.evaluation.figures import FIGURES, headline, percent, size, spread, to_target
from fedskew.experiment.config import Experiment
from fedskew.experiment.diagnostics import DIAGNOSED
from fedskew.experiment.run import Run
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.studies.compare import carry_out, summarise, write

PROGRESS = (
    TextColumn("round"),
    MofNCompleteColumn(),
    BarColumn(bar_width=30),
    TextColumn("{task.fields[words]}"),
    TimeRemainingColumn(),
)
PAGE = 160  # columns where there is no terminal to ask
QUIET = 5.0  # seconds between lines of progress where there is no terminal


def console(as_json: bool) -> Console:
    """Where people read: stdout, or stderr when stdout is for the JSON object."""
    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    return Console(stderr=as_json, highlight=False, width=None if terminal else PAGE)


def emit(value: Any) -> None:
    print(json.dumps(value))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    made = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        words = any(isinstance(row[i], str) and not row[i][:1].isdigit() for row in rows)
        made.add_column(column, justify="left" if words else "right")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def follow(run: Run, *, as_json: bool, target: float | None) -> None:
    """Carry out a run under the reader's eyes; exit 130 on Ctrl-C and 3 when the quorum is lost, state saved."""
    screen = console(as_json)
    where = run.directory.path if run.directory is not None else None
    for trouble in run.notes:
        screen.print(f"note: {trouble}")
    if run.start is not None:
        screen.print(f"taking up {where} after round {run.start[0]} of {run.rounds}")
    else:
        introduce(run, screen)
    try:
        _watch(run, screen)
    except KeyboardInterrupt:
        print(f"fedskew: stopped; go on with: fedskew run --resume {where}", file=sys.stderr)
        raise SystemExit(130) from None
    except QuorumLost as lost:
        print(f"fedskew: {lost}. Nothing is lost; go on with: fedskew run --resume {where}", file=sys.stderr)
        raise SystemExit(3) from None
    result = run.result | {"directory": str(where)}
    if target is not None:
        result["to_target"] = {"accuracy": target, **to_target(run.records, target)}
    if as_json:
        emit(result)
    else:
        conclude(result, screen)


def introduce(run: Run, screen: Console) -> None:
    experiment, setting = run.experiment, run.assembled
    data = setting.data
    sizes = setting.world.train.sizes()
    screen.print(
        f"{experiment.method_name} on {data.name} ({len(data.y_train)} training samples, {data.classes} classes), "
        f"{len(sizes)} clients of {min(sizes)} to {max(sizes)} samples, {setting.cohort_size} a round"
    )
    for note in setting.partition.notes:
        screen.print(f"note: {note}")


def _watch(run: Run, screen: Console) -> None:
    last = time.monotonic()
    with Progress(*PROGRESS, console=screen, disable=not screen.is_terminal) as bar:
        done = run.start[0] if run.start else 0
        task = bar.add_task("", total=run.rounds, completed=done, words="")
        for record in run:
            bar.update(task, completed=record.round + 1, words=words(record))
            for client, why in record.lost.items():
                screen.print(f"round {record.round + 1}: client {client} {why}")
            if not screen.is_terminal and (time.monotonic() - last > QUIET or record.round == run.rounds - 1):
                screen.print(f"round {record.round + 1}/{run.rounds} {words(record)}")
                last = time.monotonic()


def words(record: Record) -> str:
    accuracy = headline(record.metrics or {})
    loss = record.training.get("loss")
    return " ".join(
        [
            f"accuracy {percent(accuracy)} %" if accuracy is not None else "",
            f"loss {loss:.3f}" if loss is not None else "",
        ]
    ).strip()


def conclude(result: dict[str, Any], screen: Console) -> None:
    metrics = result["metrics"] or {}
    rows: list[tuple[str, str]] = []
    if metrics.get("global"):
        rows.append(("global model, balanced test set", percent(metrics["global"]["accuracy"])))
        for word in metrics.get("groups", {}):
            rows.append((f"global model, {word} classes", percent(metrics["global"][word])))
    if metrics.get("ensemble"):
        rows.append(("ensemble at the server, balanced test set", percent(metrics["ensemble"]["accuracy"])))
    for word, title in (("clients", "own test part"), ("new", "new clients' test part")):
        for kind in ("global", "personal"):
            figures = (metrics.get(word) or {}).get(kind)
            if figures and not (kind == "personal" and figures == metrics[word]["global"]):  # one model, said once
                name = f"{kind} model, {title}"
                rows.append((f"{name}: mean of {figures['clients']} clients", percent(figures["mean"])))
                rows.append((f"{name}: worst tenth", percent(figures["worst_decile"])))
    screen.print()
    screen.print(
        table(f"{result['method']}, {result['rounds']} rounds, seed {result['seed']}", ["accuracy", "%"], rows)
    )
    spent = f"{size(result['bytes_up'])} up, {size(result['bytes_down'])} down"
    screen.print(
        f"\n{spent}; clients {result['client_seconds']:.1f} s, server {result['server_seconds']:.1f} s, "
        f"in all {result['seconds']:.1f} s"
    )
    if drift := result.get("diagnostics"):
        spread, apart = ("-" if drift[key] is None else f"{drift[key]:.4g}" for key in DIAGNOSED)
        screen.print(f"eigenvalue spread {spread}, mean distance of {drift['clients']} clients' heads {apart}")
    if reached := result.get("to_target"):
        how = f"{reached['rounds']} rounds, {size(reached['bytes'])}" if reached["rounds"] else "not reached"
        screen.print(f"to {percent(reached['accuracy'])} %: {how}")
    screen.print(f"digest {result['digest'][:16]}, model_digest {result['model_digest'][:16]}")
    screen.print(f"all of it in {result['directory']}")
    screen.print("\nnext: fedskew split --png split.png    see how skewed the clients are")
    screen.print("      fedskew run --method fedprox     another method on the same clients")


def show_comparison(
    base: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    target: float | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    screen = console(as_json)
    with Progress(*PROGRESS, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=base.rounds * len(methods) * len(seeds), words="")
        last = time.monotonic()

        def watch(text: str, seed: int, run: Run, record: Record) -> None:
            nonlocal last
            place = seeds.index(seed) * len(methods) + list(methods).index(text)
            done = (place + (record.round + 1) / run.rounds) * base.rounds
            bar.update(task, completed=done, words=f"{text} seed {seed} {words(record)}")
            if not screen.is_terminal and (time.monotonic() - last > QUIET or record.round == run.rounds - 1):
                screen.print(f"{text} seed {seed} round {record.round + 1}/{run.rounds} {words(record)}")
                last = time.monotonic()

        try:
            rows = carry_out(base, methods, seeds, out, watch, **options)
        except KeyboardInterrupt:
            print("fedskew: stopped; the same command goes on from here", file=sys.stderr)
            raise SystemExit(130) from None
    lines = summarise(rows, target)
    write(out, base, rows, lines)
    if as_json:
        emit({"methods": lines, "directory": str(out)})
        return
    told = [word for word in FIGURES if any(line[word] is not None for line in lines)]
    columns = [
        "method",
        "seeds",
        "rounds",
        *told,
        *(["rounds to target"] if target else []),
        "traffic",
        "client s",
        "server s",
    ]
    shown = [
        [
            line["method"],
            line["seeds"],
            line["rounds"],
            *(spread(line[word], line[f"{word}_std"]) for word in told),
            *([line["rounds_to_target"] or "-"] if target else []),
            "-" if line["bytes"] is None else size(line["bytes"]),
            "-" if line["client_seconds"] is None else f"{line['client_seconds']:.1f}",
            "-" if line["server_seconds"] is None else f"{line['server_seconds']:.1f}",
        ]
        for line in lines
    ]
    screen.print(table(f"{base.data if isinstance(base.data, str) else base.data.name}, {base.split}", columns, shown))
    screen.print(
        "accuracy in %, mean and spread over seeds: of the global model on the balanced test set (global) and on the"
    )
    screen.print(
        "clients' own test parts (clients), of the clients' own models there (personal), their worst tenth, new clients"
    )
    if "tail" in told:
        screen.print("head, middle, tail: of the global model, over thirds of the classes by training samples")
    for row in rows:
        if row["failed"]:
            screen.print(f"{row['method']} seed {row['seed']} failed: {row['failed']}")
    screen.print(f"all of it in {out}")
