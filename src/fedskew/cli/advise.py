"""`fedskew advise`: which method to use on these data."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedskew.cli.console import make_screen, make_table, metered, print_json, resumable
from fedskew.cli.options import (
    ClientsPerRound,
    Config,
    Data,
    DataDir,
    Device,
    Engine,
    Json,
    Model,
    Rounds,
    Set,
    Split,
    Workers,
    given_settings,
    read_experiment,
    run_options,
    seed_list,
)
from fedskew.cli.quick_start import load_torch
from fedskew.core.settings import UsageError

if TYPE_CHECKING:
    from fedskew.experiment.config import Experiment
    from fedskew.studies.advise import Advice, Progress

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def add_commands(app: typer.Typer) -> None:
    """Add `advise` to the command line."""
    app.command("advise")(advise_command)


def advise_command(
    methods: Annotated[list[str] | None, typer.Argument(metavar="[METHOD]", hidden=True)] = None,
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="What all runs together may take; default 10.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(metavar="N", help="In place of --minutes: rounds that all runs together may train.")
    ] = None,
    no_public: Annotated[bool, typer.Option("--no-public", help="The server has no public data.")] = False,
    no_state: Annotated[bool, typer.Option("--no-state", help="Clients keep nothing between rounds.")] = False,
    sums_only: Annotated[bool, typer.Option("--sums-only", help="The server sees only sums over clients.")] = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="What a client may send and receive in a round together, e.g. 2MB."),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="GOAL",
            help="own (default): the model each client would use; global: one model for all. With a measure if wanted: "
            "global:f1, own:auroc.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="Seeds of the final runs, three or more. Default: 0-4, and up to 20 seeds if a lead is open and the "
            "budget allows.",
        ),
    ] = None,
    set_: Set = None,
    config: Config = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs and the answer; default: one of its own.")
    ] = None,
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Find the method to use on these data. Run it again to resume.

    Methods race on the clients' validation data; the leaders run again with fresh seeds beside tuned FedAvg. METHODs
    replace the list that fedskew would race.
    """
    began = time.monotonic()
    load_torch()
    from fedskew.studies.advise import Limits, advise
    from fedskew.studies.advise.advising import check_seeds, make_budget
    from fedskew.studies.advise.goal import read_goal

    screen = make_screen(as_json)
    settings = given_settings(data=data, split=split, model=model, rounds=rounds, clients_per_round=clients_per_round)
    experiment = with_owners(read_experiment(config, settings, set_), "split" in settings, config, set_, data_dir)
    limits = Limits(public=not no_public, state=not no_state, sums_only=sums_only, max_bytes=read_bytes(max_bytes))
    chosen = None if seeds is None else check_seeds(seed_list(seeds))
    asked: dict[str, Any] = {"minutes": minutes, "budget_rounds": budget, "limits": limits, "goal": goal}
    asked |= {"seeds": chosen, "methods": tuple(methods or ())}
    make_budget(minutes, budget)
    read_goal(goal, True)
    folder = out or advice_out(experiment, asked)
    options = run_options(workers, engine, device, data_dir)
    options.pop("track")
    screen.print(f"racing methods on {experiment.data}, {experiment.split}; runs in {folder}", markup=False)
    with resumable("the same command"), metered(screen, 1) as meter:

        def watch(now: Progress) -> None:
            left = f"about {now.seconds / 60:.1f} minutes left"
            meter.bar.update(meter.task, total=now.total)
            line = f"{now.done} of about {now.total} rounds, {left}: {now.text}"
            meter.update(now.done, now.text, line)

        advice = advise(experiment, out=folder, watch=watch, began=began, **asked, **options)
    show_advice(advice, folder, screen, as_json)


def with_owners(
    experiment: Experiment, given: bool, config: Path | None, assignments: list[str] | None, data_dir: Path | None
) -> Experiment:
    """The experiment with one client per owner, if the data name owners and no split was given."""
    from dataclasses import replace

    from fedskew.data.sources.loading import load
    from fedskew.experiment.config import read_toml

    in_file = config is not None and "split" in read_toml(config)
    in_set = any(text.partition("=")[0].strip() == "split" for text in assignments or [])
    if given or in_file or in_set or not isinstance(experiment.data, str):
        return experiment
    has_owners = load(experiment.data, data_dir).owners_train is not None
    return replace(experiment, split="natural") if has_owners else experiment


def read_bytes(text: str | None) -> int | None:
    """`2MB` gives 2000000; None stays None.

    >>> read_bytes("2MB"), read_bytes("500")
    (2000000, 500)
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9.]+) ?(B|kB|MB|GB)?", text.strip())
    try:
        count = float(found[1]) * UNITS[found[2] or ""] if found else 0.0
    except ValueError:
        count = 0.0
    if count < 1:
        raise UsageError(f"--max-bytes {text} is invalid: expected a number of bytes such as 500kB or 2MB.")
    return int(count)


def advice_out(experiment: Experiment, asked: dict[str, Any]) -> Path:
    """runs/advise-<data>-<code>: a folder of this question's own. The same question has the same folder."""
    import json

    from fedskew.core.files import sha256

    settings = {key: value for key, value in experiment.as_dict().items() if key not in ("method", "seed")}
    told = json.dumps([settings, asked], sort_keys=True, default=str)
    name = Path(str(experiment.data).partition("?")[0]).stem or "data"
    return Path("runs") / f"advise-{name}-{sha256(told.encode())[:8]}"


def show_advice(advice: Advice, folder: Path, screen: Console, as_json: bool) -> None:
    """Write the page, and print the answer or the JSON object."""
    from fedskew.evaluation.figures import FIGURES
    from fedskew.report.advice import evidence_rows, final_rows, write_page

    page = folder / "advise.html"
    write_page(advice, page)
    if as_json:
        print_json(advice.as_dict() | {"page": str(page)})
        return
    figure = FIGURES[advice.goal]
    screen.print(f"\n{advice.profile.sentence}", markup=False)
    if rows := evidence_rows(advice):
        screen.print(make_table("nearest tasks of the board", rows[0], rows[1:]))
    for name, why in advice.shortlist.excluded.items():
        screen.print(f"not raced: {name} {why}", markup=False)
    title = f"final: {advice.goal_words}" + (f", in {figure.unit}" if figure.unit else "")
    screen.print()
    columns, *lines = final_rows(advice)
    screen.print(make_table(title, columns, lines))
    screen.print("over fedavg: mean difference with the same seeds ± half its 95 % interval", markup=False)
    for note in advice.notes:
        screen.print(f"note: {note}", markup=False)
    for warning in advice.warnings:
        screen.print(f"warning: {warning}", markup=False)
    screen.print(f"\n{advice.sentence}", markup=False, soft_wrap=True)
    if advice.best_global:
        screen.print(advice.best_global, markup=False, soft_wrap=True)
    screen.print(f"\n{advice.spent}; all of it on one page: {page}", markup=False)
    if advice.command:
        screen.print(f"next: {advice.command}", markup=False, soft_wrap=True)
