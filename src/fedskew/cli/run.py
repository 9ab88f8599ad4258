"""`fedskew run`: one experiment, its progress and its final figures."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedskew.cli.console import make_screen, make_table, metered, print_json, record_text, resumable
from fedskew.cli.options import (
    ClientsPerRound,
    Config,
    Data,
    DataDir,
    Device,
    Engine,
    Json,
    MethodName,
    Model,
    Quorum,
    Resume,
    Rounds,
    RunOut,
    Seed,
    Set,
    Split,
    Target,
    Track,
    Workers,
    check_resume,
    default_out,
    given_settings,
    read_experiment,
    run_options,
)
from fedskew.evaluation.figures import ACCURACIES, DIAGNOSTICS, OVER_CLIENTS, bytes_text, percent, to_target

if TYPE_CHECKING:
    from pathlib import Path

    from fedskew.evaluation.metrics import Population
    from fedskew.experiment.config import Experiment
    from fedskew.experiment.result import Result
    from fedskew.experiment.run import Run


def add_commands(app: typer.Typer) -> None:
    """Add `run` to the command line."""
    app.command("run")(run_command)


def run_command(
    method: MethodName = None,
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    seed: Seed = None,
    out: RunOut = None,
    set_: Set = None,
    config: Config = None,
    device: Device = "auto",
    workers: Workers = None,
    engine: Engine = "processes",
    dropout: Annotated[
        str | None, typer.Option(metavar="P", help="Probability that a selected client is absent.")
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="FAULTS", help="Simulated faults, e.g. nan:rate=0.1+die:client=3,round=2; both count from 0."
        ),
    ] = None,
    quorum: Quorum = None,
    resume: Resume = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Rounds between checkpoints; 0 spaces them so that they stay cheap."),
    ] = 0,
    target: Target = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="At the end, measure collapse of features and drift of heads.")
    ] = False,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log details to stderr.")] = False,
) -> None:
    """Run one experiment. The default is FedAvg on scikit-learn's digits with ten skewed clients."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    from fedskew.experiment.run import Run
    from fedskew.experiment.run import resume as resume_run

    options = run_options(workers, engine, device, data_dir, track) | {"checkpoint_every": checkpoint_every}
    settings = given_settings(
        method=method,
        data=data,
        split=split,
        model=model,
        rounds=rounds,
        clients_per_round=clients_per_round,
        seed=seed,
        dropout=dropout,
        fault=fault,
        quorum=quorum,
        diagnose=diagnose or None,
    )
    if resume is not None:
        check_resume(resume, settings, set_, config, out)
        run = resume_run(resume, **options)
    else:
        experiment = read_experiment(config, settings, set_)
        run = Run(experiment, out=out or default_out(experiment), **options)
    follow(run, as_json=as_json, target=target, data_dir=data_dir)


def follow(run: Run, *, as_json: bool, target: float | None, data_dir: Path | None = None) -> None:
    """Carry out a run, print its progress, then its final figures (or the JSON object).

    `data_dir` is the option of that name, for the commands that are proposed at the end.
    """
    screen = make_screen(as_json)
    path = run.directory.path if run.directory is not None else None
    for note in run.notes:
        screen.print(f"note: {note}")
    if run.start is not None:
        screen.print(f"resuming {path} after round {run.start[0]} of {run.rounds}")
    else:
        print_setting(run, screen)
    with resumable(f"fedskew run --resume {shlex.quote(str(path))}"):
        print_rounds(run, screen)
    assert run.result is not None
    reached = {} if target is None else {"accuracy": target, **to_target(run.records, target)}
    if as_json:
        more = {"directory": str(path)} | ({"to_target": reached} if reached else {})
        print_json(run.result.as_dict() | more)
    else:
        print_result(run.result, reached, path, screen)
        print_next(run.experiment, path, data_dir, screen)


def print_setting(run: Run, screen: Console) -> None:
    """One line about method, data and clients, and the notes of the split."""
    setting = run.assembled
    data, sizes = setting.data, setting.world.train.sizes()
    screen.print(
        f"{run.experiment.method_name} on {data.name} ({len(data.y_train)} training samples, {data.classes} classes), "
        f"{len(sizes)} clients of {min(sizes)} to {max(sizes)} samples, {setting.cohort_size} per round"
    )
    for note in setting.partition.notes:
        screen.print(f"note: {note}")


def print_rounds(run: Run, screen: Console) -> None:
    """Carry out the rounds, with a progress bar or lines; lost clients are named."""
    with metered(screen, run.rounds, run.start[0] if run.start else 0) as meter:
        for record in run:
            number, text = record.number, record_text(record)
            for client, why in record.lost.items():
                screen.print(f"round {number}: client {client} {why}")
            meter.update(number, text, f"round {number}/{run.rounds} {text}", always=number == run.rounds)


def print_result(result: Result, reached: dict[str, Any], path: Path | None, screen: Console) -> None:
    """The final accuracies as a table, then costs, diagnostics and digests.

    `reached` says when the target was reached (empty: no target), `path` is the run's directory.
    """
    screen.print()
    title = f"{result.method}, {result.rounds} rounds, seed {result.seed}"
    screen.print(make_table(title, ["accuracy", "%"], accuracy_rows(result)))
    sent = f"{bytes_text(result.bytes_up)} up, {bytes_text(result.bytes_down)} down"
    screen.print(
        f"\n{sent}; clients {result.client_seconds:.1f} s, server {result.server_seconds:.1f} s, "
        f"total {result.seconds:.1f} s"
    )
    if result.diagnostics is not None:
        found = [f"{figure.words} {figure.text(figure.read(result))}" for figure in DIAGNOSTICS.values()]
        screen.print(f"{', '.join(found)} ({result.diagnostics.clients} clients)")
    if reached:
        how = f"{reached['rounds']} rounds, {bytes_text(reached['bytes'])}" if reached["rounds"] else "not reached"
        screen.print(f"to {percent(reached['accuracy'])} %: {how}")
    screen.print(f"digest {result.digest[:16]}, model_digest {result.model_digest[:16]}")
    screen.print(f"saved in {path}")


def print_next(experiment: Experiment, path: Path | None, data_dir: Path | None, screen: Console) -> None:
    """Two commands that continue from this run, on the same clients: look at the split, run another method."""
    where = ["--data-dir", str(data_dir)] if data_dir is not None else []
    data = ["--data", str(experiment.data)] if experiment.data != "digits" else []
    seed = ["--seed", str(experiment.seed)] if experiment.seed else []
    other = "fedavg" if experiment.method_name == "fedprox" else "fedprox"
    split = ["fedskew", "split", experiment.split, *data, *seed, *where, "--png", "split.png"]
    run = ["fedskew", "run", "--config", f"{path}/settings.toml", "--method", other, *where]
    screen.print()
    for lead, words, what in (("next:", split, "see how skewed they are"), ("     ", run, "another method")):
        screen.print(f"{lead} {shlex.join(words)}    {what}", markup=False, soft_wrap=True)


def accuracy_rows(result: Result) -> list[tuple[str, str]]:
    """The accuracies a run has, as (words, percent). Personal models that are the global model are left out."""
    rows = [(f.words, f.read(result)) for f in ACCURACIES.values() if f.key not in OVER_CLIENTS]
    for figure in OVER_CLIENTS.values():
        _, part, model, _ = figure.place
        group: Population | None = getattr(result.metrics, part, None)
        scores = None if group is None else group.personal if model == "personal" else group.global_
        if group is not None and scores is not None and not (model == "personal" and scores == group.global_):
            rows.append((f"{figure.words} of {scores.clients} clients", figure.read(result)))
    return [(words, percent(value)) for words, value in rows if value is not None]
