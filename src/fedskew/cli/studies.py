"""`fedskew compare`, `table`, `tune` and `report`: their options. What they print is in the modules they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.console import make_screen, print_json
from fedskew.cli.options import (
    ClientsPerRound,
    Config,
    Data,
    DataDir,
    Device,
    Engine,
    Goal,
    Json,
    Model,
    OnDivergence,
    Rounds,
    Set,
    Split,
    Target,
    Track,
    Workers,
    comparison_out,
    given_settings,
    read_experiment,
    run_options,
    seed_list,
)
from fedskew.cli.quick_start import load_torch
from fedskew.evaluation.figures import bytes_text

# Arguments are hidden because Typer would list them with their Python type; the commands' docstrings explain them.
Methods = Annotated[list[str], typer.Argument(metavar="METHOD", hidden=True)]
RESULTS_PAGE = Path("docs/results.md")


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("compare")(compare_command)
    app.command("table")(table_command)
    app.command("tune")(tune_command)
    app.command("report")(report_command)


def compare_command(
    methods: Methods,
    seeds: Annotated[str, typer.Option(metavar="SEEDS", help="Seeds, e.g. 0,1,2 or 0-4.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    on_divergence: OnDivergence = None,
    set_: Set = None,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the runs and the table; default: a folder for this comparison."),
    ] = None,
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    target: Target = None,
    goal: Goal = None,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compare methods on the same clients in one table. Run it again to resume.

    METHOD is a method's name with optional settings: fedavg, fedprox:mu=0.1.
    """
    load_torch()
    from fedskew.cli.comparison import show_comparison
    from fedskew.evaluation.figures import check_goal, target_value
    from fedskew.studies.compare import distinct

    settings = given_settings(
        data=data,
        split=split,
        model=model,
        rounds=rounds,
        clients_per_round=clients_per_round,
        on_divergence=on_divergence,
    )
    experiment = read_experiment(config, settings, set_)
    options = run_options(workers, engine, device, data_dir, track)
    reach = None if target is None else target_value(target, check_goal(goal))
    chosen, given_seeds = distinct(methods), seed_list(seeds)
    folder = out or comparison_out(experiment, chosen, given_seeds)
    show_comparison(experiment, chosen, given_seeds, folder, reach, as_json, options, check_goal(goal))


def table_command(
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    row: Annotated[list[str] | None, typer.Option(metavar="ROW", help="Run only this row; repeatable.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Run only this column; repeatable.")
    ] = None,
    scale: Annotated[
        str, typer.Option(metavar="SCALE", help="paper (as published) or reduced (for two CPU cores).")
    ] = "reduced",
    seeds: Annotated[
        str | None, typer.Option(metavar="SEEDS", help="Seeds, e.g. 0,1,2 or 0-4; default: the recipe's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; default runs/tables/<name>.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of finished tables.")] = Path("results"),
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a published table and compare it with the paper's values. Run it again to resume.

    NAME is a table's name or the path of your own recipe (a .toml file); `list` lists the tables, `docs` writes
    docs/results.md from the finished ones.
    """
    from fedskew.cli.tables import list_tables, show_table
    from fedskew.report.results import write_results

    options = run_options(workers, engine, device, data_dir, track)
    if name == "list":
        list_tables(as_json)
    elif name == "docs":
        print(f"{write_results(results, RESULTS_PAGE)} tables written to {RESULTS_PAGE}")
    else:
        show_table(
            name,
            scale,
            rows=row or [],
            columns=column or [],
            seeds=seed_list(seeds) if seeds else [],
            out=out,
            results=results,
            as_json=as_json,
            options=options,
        )


def tune_command(
    methods: Methods,
    budget: Annotated[int, typer.Option(min=1, metavar="N", help="Trials of each method.")] = 20,
    seeds: Annotated[str, typer.Option(metavar="SEEDS", help="Seeds; a trial's accuracy is their mean.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    set_: Set = None,
    config: Config = None,
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="NAME=LOW:HIGH", help="Range to search: fedprox.mu=0.001:1; repeatable."),
    ] = None,
    goal: Goal = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the study and the chosen experiments.")] = Path(
        "runs/tune"
    ),
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Tune methods with the same budget each, on validation data. Run it again to resume.

    METHOD is a method's name with settings that stay fixed: fedavg, fedpg:lambda_v=1.
    """
    load_torch()
    from fedskew.cli.tuning import show_search
    from fedskew.evaluation.figures import check_goal
    from fedskew.studies.tune import Search, read_range

    settings = given_settings(data=data, split=split, model=model, rounds=rounds)
    plan = Search(
        base=read_experiment(config, settings, set_),
        methods=tuple(methods),
        budget=budget,
        seeds=tuple(seed_list(seeds)),
        out=out,
        goal=check_goal(goal),
        ranges=dict(read_range(text) for text in range_ or []),
    )
    show_search(plan, as_json, run_options(workers, engine, device, data_dir))


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", hidden=True)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    drift: Annotated[bool, typer.Option(help="Compute drift from the saved models.")] = True,
    goal: Goal = None,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about runs.

    DIR is a run's directory, or a folder that contains some.
    """
    from fedskew.report.html import write_report

    screen = make_screen(as_json)
    count = write_report(
        folders,
        out,
        drift=drift,
        data_dir=data_dir,
        goal=goal,
        target=target,
        say=lambda text: screen.print(text, markup=False),
    )
    if as_json:
        print_json({"runs": count, "file": str(out), "bytes": out.stat().st_size})
    else:
        screen.print(f"{count} runs in {out} ({bytes_text(out.stat().st_size)})", markup=False)
