"""Options that several commands have, and what becomes of them: an experiment, a device, a folder."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedskew.core.settings import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; all else goes to stderr.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data sets; else FEDSKEW_DATA, else the user's cache.")]
Data = Annotated[str | None, typer.Option(help="A data set's name, or a path to your own (see `fedskew data`).")]
Track = Annotated[list[str] | None, typer.Option(help="Tell tensorboard, mlflow or wandb too; may be given again.")]
Split = Annotated[str | None, typer.Option(help="How data are dealt, e.g. dirichlet:alpha=0.1,clients=10.")]
Model = Annotated[str | None, typer.Option(help="A model's name (see `fedskew models`).")]
MethodName = Annotated[str | None, typer.Option(help="A method's name (see `fedskew methods`).")]
Rounds = Annotated[str | None, typer.Option(help="Rounds to run.")]
Cohort = Annotated[str | None, typer.Option(help="A count, a share below 1, or all.")]
Seed = Annotated[str | None, typer.Option(help="Decides everything that is drawn.")]
Quorum = Annotated[str | None, typer.Option(help="Updates a round needs: a count, or a share below 1.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, e.g. training.lr=0.05.")]
Config = Annotated[Path | None, typer.Option(help="An experiment as TOML; options override it.")]
RunOut = Annotated[Path | None, typer.Option(help="Directory of this run; default runs/<name and time>.")]
Resume = Annotated[Path | None, typer.Option(help="Take up the run in this directory.")]
Workers = Annotated[str | None, typer.Option(help="Processes; default: all cores.")]
Engine = Annotated[str, typer.Option(help="processes, or ray: actors, on the cluster that RAY_ADDRESS names.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Target = Annotated[float | None, typer.Option(help="Report rounds and bytes to this accuracy.")]


def read_experiment(config: Path | None, given: dict[str, Any], assignments: list[str]) -> Any:
    """A file's settings, overridden by options, overridden by --set."""
    from fedskew.experiment.config import from_dict, read_toml

    values = read_toml(config) if config is not None else {}
    if "method.name" in given and values.get("method", {}).get("name") != given["method.name"]:
        values.pop("method", None)  # another method's fields do not apply
    for key, value in given.items():
        assign(values, key, value)
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} will not do: write --set name=value, as in --set training.lr=0.05.")
        assign(values, key.strip(), plain_value(value.strip()))
    return from_dict(values)


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UsageError(f"{key} will not do: {table} is a single setting, not a table.")
    values[name] = value


def plain_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def seed_list(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text} will not do: give whole numbers, as in 0,1,2.") from None


def run_options(
    workers: str | None, engine: str, device: str, data_dir: Path | None, track: list[str] | None = None
) -> dict[str, Any]:
    """Where and how a run is carried out, beside what it is; mistakes are found here."""
    from fedskew.experiment.tracking import trackers
    from fedskew.federation.simulate.ray import import_ray

    trackers(track or [])
    if engine not in ("processes", "ray"):
        raise UsageError(f"--engine {engine} will not do: there are processes and ray.")
    if engine == "ray":
        import_ray()
    return {
        "workers": worker_count(workers),
        "engine": engine,
        "device": pick_device(device),
        "data_dir": data_dir,
        "track": tuple(track or ()),
    }


def worker_count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--workers {text} will not do: give a number of processes from 1 up.")
    return int(text)


def pick_device(name: str) -> str:
    import torch

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there.get(name, False):
        usable = ", ".join(device for device, is_there in there.items() if is_there)
        raise UsageError(f"--device {name} is not to be had here; there is {usable} (or auto).")
    return name


def default_out(method: str, data: str) -> Path:
    name = Path(data).stem if data else "data"
    return Path("runs") / f"{method}-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1000:03d}"
