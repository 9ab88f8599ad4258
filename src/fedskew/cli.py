"""The command line. A user's mistake is one sentence on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedskew.deploy.commands import attach
from fedskew.settings import Mistake

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; all else goes to stderr.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data sets; else FEDSKEW_DATA, else the user's cache.")]
Data = Annotated[str | None, typer.Option(help="A data set's name, or a path to your own (see `fedskew data`).")]
Track = Annotated[list[str] | None, typer.Option(help="Tell tensorboard, mlflow or wandb too; may be given again.")]
Split = Annotated[str | None, typer.Option(help="How data are dealt, e.g. dirichlet:alpha=0.1,clients=10.")]


@app.callback()
def entry() -> None:
    """Federated learning that survives skewed data."""


@app.command("run")
def run_command(
    method: Annotated[str | None, typer.Option(help="A method's name (see `fedskew methods`).")] = None,
    data: Data = None,
    split: Split = None,
    model: Annotated[str | None, typer.Option(help="A model's name (see `fedskew models`).")] = None,
    rounds: Annotated[str | None, typer.Option(help="Rounds to run.")] = None,
    clients_per_round: Annotated[str | None, typer.Option(help="A count, a share below 1, or all.")] = None,
    seed: Annotated[str | None, typer.Option(help="Decides everything that is drawn.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of this run; default runs/<name and time>.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, e.g. training.lr=0.05.")] = None,
    config: Annotated[Path | None, typer.Option(help="An experiment as TOML; options override it.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    workers: Annotated[str | None, typer.Option(help="Processes; default: all cores.")] = None,
    dropout: Annotated[str | None, typer.Option(help="Chance that a selected client is absent.")] = None,
    fault: Annotated[
        str | None, typer.Option(help="Faults on purpose, e.g. nan:rate=0.1+die:client=3,round=2.")
    ] = None,
    quorum: Annotated[str | None, typer.Option(help="Updates a round needs: a count, or a share below 1.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Take up the run in this directory.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Rounds; 0 spaces them so they stay cheap.")] = 0,
    target: Annotated[float | None, typer.Option(help="Report rounds and bytes to this accuracy.")] = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Say how far features collapse, heads drift.")] = False,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option(help="Say more on stderr.")] = False,
) -> None:
    """Run one experiment. Without options: FedAvg on scikit-learn's digits, ten skewed clients."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    from fedskew import show
    from fedskew.runner import Run
    from fedskew.runner import resume as resume_run

    options: dict[str, Any] = {
        "workers": _workers(workers),
        "data_dir": data_dir,
        "device": pick_device(device),
        "checkpoint_every": checkpoint_every,
        "track": _tracked(track),
    }
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
            raise Mistake(f"--resume takes up {resume} as it was; it goes with no other setting.")
        run = resume_run(resume, **options)
    else:
        experiment = read_experiment(config, values, set_ or [])
        run = Run(experiment, out=out or default_out(experiment.method_name, str(experiment.data)), **options)
    show.follow(run, as_json=as_json, target=target)


def _workers(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise Mistake(f"--workers {text} will not do: give a number of processes from 1 up.")
    return int(text)


def _tracked(names: list[str] | None) -> tuple[str, ...]:
    from fedskew.track import trackers

    trackers(names or [])
    return tuple(names or ())


def pick_device(name: str) -> str:
    import torch

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there.get(name, False):
        usable = ", ".join(device for device, is_there in there.items() if is_there)
        raise Mistake(f"--device {name} is not to be had here; there is {usable} (or auto).")
    return name


def default_out(method: str, data: str) -> Path:
    name = Path(data).stem if data else "data"
    return Path("runs") / f"{method}-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1000:03d}"


def read_experiment(config: Path | None, given: dict[str, Any], assignments: list[str]) -> Any:
    """A file's settings, overridden by options, overridden by --set."""
    from fedskew.experiment import from_dict, read_toml

    values = read_toml(config) if config is not None else {}
    if "method.name" in given and values.get("method", {}).get("name") != given["method.name"]:
        values.pop("method", None)  # another method's fields do not apply
    for key, value in given.items():
        assign(values, key, value)
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise Mistake(f"--set {text} will not do: write --set name=value, as in --set training.lr=0.05.")
        assign(values, key.strip(), plain_value(value.strip()))
    return from_dict(values)


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise Mistake(f"{key} will not do: {table} is a single setting, not a table.")
    values[name] = value


def plain_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@app.command("compare")
def compare_command(
    methods: Annotated[list[str], typer.Argument(help="Methods, with settings if wanted: fedavg fedprox:mu=0.1 ...")],
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Annotated[str | None, typer.Option(help="A model's name.")] = None,
    rounds: Annotated[str | None, typer.Option(help="Rounds to run.")] = None,
    clients_per_round: Annotated[str | None, typer.Option(help="A count, a share below 1, or all.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, e.g. training.lr=0.05.")] = None,
    config: Annotated[Path | None, typer.Option(help="An experiment as TOML; options override it.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the table.")] = Path("runs/compare"),
    workers: Annotated[str | None, typer.Option(help="Processes; default: all cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    target: Annotated[float | None, typer.Option(help="Report rounds and bytes to this accuracy.")] = None,
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run several methods on the same clients and print one table. Goes on where it was cut off."""
    from fedskew import show

    given = {"data": data, "split": split, "model": model, "rounds": rounds, "clients_per_round": clients_per_round}
    experiment = read_experiment(config, {k: v for k, v in given.items() if v is not None}, set_ or [])
    options: dict[str, Any] = {"workers": _workers(workers), "data_dir": data_dir, "device": pick_device(device)}
    options["track"] = _tracked(track)
    show.show_comparison(experiment, methods, _seeds(seeds), out, target, as_json, options)


@app.command("table")
def table_command(
    name: Annotated[str, typer.Argument(help="A table's name, the path of your own, `list`, or `docs`.")],
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given again.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only this column; may be given again.")] = None,
    scale: Annotated[str, typer.Option(help="paper (as published) or reduced (two CPU cores).")] = "reduced",
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1,2; default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/tables/<name>.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of finished tables.")] = Path("results"),
    workers: Annotated[str | None, typer.Option(help="Processes; default: all cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    track: Track = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a published table and print ours beside the paper's, with a verdict. Goes on where it was cut off."""
    from fedskew import results as kept

    options = {
        "workers": _workers(workers),
        "data_dir": data_dir,
        "device": pick_device(device),
        "track": _tracked(track),
    }
    if name == "list":
        kept.list_tables(as_json)
    elif name == "docs":
        kept.write_docs(results, Path("docs/results.md"))
    else:
        chosen = _seeds(seeds) if seeds else []
        kept.show_table(name, scale, row or [], column or [], chosen, out, results, as_json, options)


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise Mistake(f"--seeds {text} will not do: give whole numbers, as in 0,1,2.") from None


@app.command("tune")
def tune_command(
    methods: Annotated[list[str], typer.Argument(help="Methods, with settings that stay fixed: fedavg fedprox ...")],
    budget: Annotated[int, typer.Option(min=1, help="Trials of each method.")] = 20,
    seeds: Annotated[str, typer.Option(help="Seeds; a trial's accuracy is their mean.")] = "0",
    data: Data = None,
    split: Split = None,
    model: Annotated[str | None, typer.Option(help="A model's name.")] = None,
    rounds: Annotated[str | None, typer.Option(help="Rounds of a trial.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, e.g. training.epochs=2.")] = None,
    config: Annotated[Path | None, typer.Option(help="An experiment as TOML; options override it.")] = None,
    range_: Annotated[list[str] | None, typer.Option("--range", help="Where to search: fedprox.mu=0.001:1.")] = None,
    goal: Annotated[str | None, typer.Option(help="global or personal; default: global where there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the study and the chosen experiments.")] = Path("runs/tune"),
    workers: Annotated[str | None, typer.Option(help="Processes; default: all cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Search each method's settings with the same budget, on validation data. Goes on where it was cut off."""
    from fedskew import tune

    given = {"data": data, "split": split, "model": model, "rounds": rounds}
    experiment = read_experiment(config, {k: v for k, v in given.items() if v is not None}, set_ or [])
    ranges = dict(tune.read_range(text) for text in range_ or [])
    plan = tune.Search(experiment, tuple(methods), budget, tuple(_seeds(seeds)), out, tune.goal(goal), ranges)
    options = {"workers": _workers(workers), "data_dir": data_dir, "device": pick_device(device)}
    tune.show_search(plan, as_json, options)


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
    from fedskew import listings

    if list_:
        listings.list_splits(as_json)
    else:
        listings.show_split(text or "dirichlet:alpha=0.3,clients=10", data, seed, png, data_dir, as_json)


@app.command("data")
def data_command(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List every data set: whether it is present, its size and shape, and whether its counts are right."""
    from fedskew import listings

    listings.list_data(data_dir, as_json)


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="One method, to see it in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: paper, what they send and keep beyond FedAvg, which models they give."""
    from fedskew import listings

    if name is None:
        listings.list_methods(as_json)
    else:
        listings.show_method(name, as_json)


@app.command("models")
def models_command(as_json: Json = False) -> None:
    """List the models."""
    from fedskew import listings

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
    except Mistake as mistake:
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
