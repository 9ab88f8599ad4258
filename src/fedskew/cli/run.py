"""`fedskew run`: one experiment, its progress and its final figures."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedskew.cli.closing import print_result
from fedskew.cli.console import end_if_diverged, make_screen, metered, print_json, record_text, resumable
from fedskew.cli.hints import print_next
from fedskew.cli.options import (
    ClientsPerRound,
    Config,
    Data,
    DataDir,
    Device,
    Engine,
    Epsilon,
    Goal,
    Json,
    MethodName,
    Model,
    OnDivergence,
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
    robust_rule,
    run_options,
    stop_rule,
)
from fedskew.cli.quick_start import load_torch
from fedskew.cli.watch import beside, check_watch
from fedskew.evaluation.cautions import cautions
from fedskew.evaluation.figures import check_goal, leading_figure, target_value
from fedskew.evaluation.rounds import to_target

if TYPE_CHECKING:
    from pathlib import Path

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
            metavar="FAULTS",
            help="Simulated faults and attacks, e.g. nan:rate=0.1+die:client=3,round=2 (both count from 0), "
            "signflip:first=2.",
        ),
    ] = None,
    robust: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Robust aggregation against hostile clients: mean, trimmed, median, geometric or krum, as in "
            "median:attackers=2,mixing=nnm.",
        ),
    ] = None,
    epsilon: Epsilon = None,
    quorum: Quorum = None,
    on_divergence: OnDivergence = None,
    resume: Resume = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Rounds between checkpoints; 0 spaces them so that they stay cheap."),
    ] = 0,
    target: Target = None,
    goal: Goal = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="At the end, measure collapse of features and drift of heads.")
    ] = False,
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="End early, by validation data (needs holdout.validation): patience=10[,figure=f1][,min_delta=0.5].",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Your own figure: a function (y_true, scores) of the global model's predictions on the test set.",
        ),
    ] = None,
    track: Track = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run in the browser while it goes on (see `fedskew watch`).")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log details to stderr.")] = False,
) -> None:
    """Run one experiment. The default is FedAvg on scikit-learn's digits with ten skewed clients."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    load_torch()
    from fedskew.experiment.run import Run
    from fedskew.experiment.run import resume as resume_run

    check_goal(goal)
    if target is not None:
        target_value(target, goal)  # a mistake shows before the run
    if watch:
        check_watch()
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
        on_divergence=on_divergence,
        diagnose=diagnose or None,
        metric=metric,
        epsilon=epsilon,
    )
    settings |= {f"robust.{key}": value for key, value in robust_rule(robust).items()}
    settings |= {f"stop.{key}": value for key, value in stop_rule(stop).items()}
    if resume is not None:
        settings.pop("rounds", None)  # a run can be given more rounds
        check_resume(resume, settings, set_, config, out)
        run = resume_run(resume, rounds=rounds, **options)
    else:
        experiment = read_experiment(config, settings, set_)
        run = Run(experiment, out=out or default_out(experiment), **options)
    with beside(run.directory.path if run.directory is not None else None, watch, make_screen(as_json)):
        follow(run, as_json=as_json, target=target, goal=goal, data_dir=data_dir)


def follow(
    run: Run, *, as_json: bool, target: float | None, goal: str | None = None, data_dir: Path | None = None
) -> None:
    """Carry out a run, print its progress, then its final figures (or the JSON object).

    `target` is the value of the figure `goal` (see `leading_figure`) to report rounds and bytes to, in percent.
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
    names = run.assembled.data.labels or ()
    reached: dict[str, Any] = {}
    if target is not None:
        lead = leading_figure(run.result.metrics, goal)
        found = to_target(run.records, target_value(target, goal), goal)
        reached = {"figure": lead.key if lead is not None else "", "target": target, **found}
    if as_json:
        more: dict[str, Any] = {"directory": str(path), "warnings": cautions(run.result.metrics, names)}
        more |= {"to_target": reached} if reached else {}
        print_json(run.result.as_dict() | more)
    else:
        print_result(run.result, reached, path, screen, names)
        print_next(run.experiment, path, data_dir, screen)
    end_if_diverged(run)


def print_setting(run: Run, screen: Console) -> None:
    """One line about method, data and clients, and the notes of the split."""
    setting = run.assembled
    data, sizes = setting.data, setting.world.train.sizes()
    screen.print(
        f"{run.experiment.method_name} on {data.name} ({len(data.y_train)} training samples, {data.classes} classes), "
        f"{len(sizes)} clients of {min(sizes)} to {max(sizes)} samples, {setting.cohort_size} per round"
    )
    if run.experiment.evaluation.every == "auto" and setting.evaluate_every > 1:
        screen.print(
            f"note: evaluation after every {setting.evaluate_every} rounds, about a tenth of the work; "
            "--set evaluation.every=1 evaluates every round"
        )
    for note in setting.notes:
        screen.print(f"note: {note}")


def print_rounds(run: Run, screen: Console) -> None:
    """Carry out the rounds, with a progress bar or lines; lost clients are named."""
    with metered(screen, run.rounds, run.start[0] if run.start else 0) as meter:
        for record in run:
            number, text = record.number, record_text(record)
            for client, why in record.lost.items():
                screen.print(f"round {number}: client {client} {why}")
            if record.diverged and run.experiment.on_divergence == "warn":
                screen.print(f"warning: {record.diverged}")
            last = number == run.rounds or run.stopped != ""
            meter.update(number, text, f"round {number}/{run.rounds} {text}", always=last)
    if run.stopped:
        screen.print(f"stopped: {run.stopped}")
