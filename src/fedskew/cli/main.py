"""The command line. A user's mistake is one sentence on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedskew.cli.deploy import attach
from fedskew.cli.options import (
    Cohort,
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
    default_out,
    read_experiment,
    run_options,
    seed_list,
)
from fedskew.core.settings import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def entry() -> None:
    """Federated learning that survives skewed data."""


@app.command("run")
def run_command(
    method: MethodName = None,
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    seed: Seed = None,
    out: RunOut = None,
    set_: Set = None,
    config: Config = None,
    device: Device = "auto",
    workers: Workers = None,
    engine: Engine = "processes",
    dropout: Annotated[str | None, typer.Option(help="Chance that a selected client is absent.")] = None,
    fault: Annotated[
        str | None, typer.Option(help="Faults on purpose, e.g. nan:rate=0.1+die:client=3,round=2.")
    ] = None,
    quorum: Quorum = None,
    resume: Resume = None,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Rounds; 0 spaces them so they stay cheap.")] = 0,
    target: Target = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Say how far features collapse, heads drift.")] = False,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option(help="Say more on stderr.")] = False,
) -> None:
    """Run one experiment. Without options: FedAvg on scikit-learn's digits, ten skewed clients."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    from fedskew.cli import console as show
    from fedskew.experiment.run import Run
    from fedskew.experiment.run import resume as resume_run

    options = run_options(workers, engine, device, data_dir, track) | {"checkpoint_every": checkpoint_every}
    given = {
        "method.name": method,
        "data": data,
        "split": split,
        "model": model,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "seed": seed,
        "trouble.dropout": dropout,
        "trouble.fault": fault,
        "trouble.quorum": quorum,
        "evaluation.diagnose": diagnose or None,
    }
    values = {key: value for key, value in given.items() if value is not None}
    if resume is not None:
        if values or set_ or config or out:
            raise UsageError(f"--resume takes up {resume} as it was; it goes with no other setting.")
        run = resume_run(resume, **options)
    else:
        experiment = read_experiment(config, values, set_ or [])
        run = Run(experiment, out=out or default_out(experiment.method_name, str(experiment.data)), **options)
    show.follow(run, as_json=as_json, target=target)


@app.command("compare")
def compare_command(
    methods: Annotated[list[str], typer.Argument(help="Methods, with settings if wanted: fedavg fedprox:mu=0.1 ...")],
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    set_: Set = None,
    config: Config = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the table.")] = Path("runs/compare"),
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    target: Target = None,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run several methods on the same clients and print one table. Goes on where it was cut off."""
    from fedskew.cli import console as show

    given = {"data": data, "split": split, "model": model, "rounds": rounds, "clients_per_round": clients_per_round}
    experiment = read_experiment(config, {k: v for k, v in given.items() if v is not None}, set_ or [])
    options = run_options(workers, engine, device, data_dir, track)
    show.show_comparison(experiment, methods, seed_list(seeds), out, target, as_json, options)


@app.command("table")
def table_command(
    name: Annotated[str, typer.Argument(help="A table's name, the path of your own, `list`, or `docs`.")],
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given again.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only this column; may be given again.")] = None,
    scale: Annotated[str, typer.Option(help="paper (as published) or reduced (two CPU cores).")] = "reduced",
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1,2; default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/tables/<name>.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of finished tables.")] = Path("results"),
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a published table and print ours beside the paper's, with a verdict. Goes on where it was cut off."""
    from fedskew.cli import tables as kept

    options = run_options(workers, engine, device, data_dir, track)
    if name == "list":
        kept.list_tables(as_json)
    elif name == "docs":
        kept.write_docs(results, Path("docs/results.md"))
    else:
        chosen = seed_list(seeds) if seeds else []
        kept.show_table(name, scale, row or [], column or [], chosen, out, results, as_json, options)


@app.command("tune")
def tune_command(
    methods: Annotated[list[str], typer.Argument(help="Methods, with settings that stay fixed: fedavg fedprox ...")],
    budget: Annotated[int, typer.Option(min=1, help="Trials of each method.")] = 20,
    seeds: Annotated[str, typer.Option(help="Seeds; a trial's accuracy is their mean.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Model = None,
    rounds: Rounds = None,
    set_: Set = None,
    config: Config = None,
    range_: Annotated[list[str] | None, typer.Option("--range", help="Where to search: fedprox.mu=0.001:1.")] = None,
    goal: Annotated[str | None, typer.Option(help="global or personal; default: global where there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the study and the chosen experiments.")] = Path("runs/tune"),
    workers: Workers = None,
    engine: Engine = "processes",
    device: Device = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Search each method's settings with the same budget, on validation data. Goes on where it was cut off."""
    from fedskew.cli import tuning
    from fedskew.studies import tune

    given = {"data": data, "split": split, "model": model, "rounds": rounds}
    experiment = read_experiment(config, {k: v for k, v in given.items() if v is not None}, set_ or [])
    ranges = dict(tune.read_range(text) for text in range_ or [])
    plan = tune.Search(experiment, tuple(methods), budget, tuple(seed_list(seeds)), out, tuning.goal(goal), ranges)
    options = run_options(workers, engine, device, data_dir)
    tuning.show_search(plan, as_json, options)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    drift: Annotated[bool, typer.Option(help="Compute drift from the saved models.")] = True,
    data_dir: DataDir = None,
) -> None:
    """Write one self-contained HTML page about runs."""
    from fedskew.report import write_report

    count = write_report(folders, out, drift=drift, data_dir=data_dir)
    print(f"{count} runs in {out}")


@app.command("split")
def split_command(
    text: Annotated[str | None, typer.Argument(help="The split, e.g. dirichlet:alpha=0.1,clients=10.")] = None,
    data: Annotated[str, typer.Option(help="A data set's name, or a path to your own.")] = "digits",
    seed: Annotated[int, typer.Option(min=0, help="Decides the draw.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw the deal to this file.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the splits there are.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show how data would be dealt, before training: a table, skew figures, a picture."""
    from fedskew.cli import listings

    if list_:
        listings.list_splits(as_json)
    else:
        listings.show_split(text or "dirichlet:alpha=0.3,clients=10", data, seed, png, data_dir, as_json)


@app.command("data")
def data_command(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List every data set: whether it is present, its size and shape, and whether its counts are right."""
    from fedskew.cli import listings

    listings.list_data(data_dir, as_json)


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="One method, to see it in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: paper, what they send and keep beyond FedAvg, which models they give."""
    from fedskew.cli import listings

    if name is None:
        listings.list_methods(as_json)
    else:
        listings.show_method(name, as_json)


@app.command("models")
def models_command(as_json: Json = False) -> None:
    """List the models."""
    from fedskew.cli import listings

    listings.list_models(as_json)


attach(app)


def _say(sentence: str, code: int) -> NoReturn:
    print(f"fedskew: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def misuse() -> Any:
    """What Typer raises at wrong options: the newer ones an error of their own, the older (Flower's) Click's."""
    own = getattr(typer, "TyperException", None)
    return own or importlib.import_module("click").ClickException


def main(arguments: list[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if app(arguments, standalone_mode=False) == 130:  # how newer Typers tell of Ctrl-C
            raise KeyboardInterrupt
    except UsageError as mistake:
        _say(str(mistake), 2)
    except misuse() as error:
        _say(error.format_message(), 2)
    except typer.Exit as leave:
        raise SystemExit(leave.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped.", 130)
    except BrokenPipeError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
