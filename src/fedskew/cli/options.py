"""Options that several commands share, and how they become an experiment and the way it is run."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.core.files import sha256
from fedskew.core.settings import UsageError

if TYPE_CHECKING:
    from fedskew.experiment.config import Experiment

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]
DataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of data sets; default $FEDSKEW_DATA, else the user's cache.")
]
Data = Annotated[
    str | None, typer.Option(metavar="DATA", help="Name of a data set (see `fedskew data`), or a path to your own.")
]
Track = Annotated[
    list[str] | None, typer.Option(metavar="TRACKER", help="Also log to tensorboard, mlflow or wandb; repeatable.")
]
Split = Annotated[
    str | None,
    typer.Option(metavar="SPLIT", help="How data are split among clients, e.g. dirichlet:alpha=0.1,clients=10."),
]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Name of a model (see `fedskew models`).")]
MethodName = Annotated[
    str | None,
    typer.Option(metavar="METHOD", help="A method (see `fedskew methods`) with optional settings: fedprox:mu=0.1."),
]
Rounds = Annotated[str | None, typer.Option(metavar="N", help="Number of rounds.")]
ClientsPerRound = Annotated[
    str | None, typer.Option(metavar="N", help="Clients selected each round: a count, a share below 1, or all.")
]
Seed = Annotated[str | None, typer.Option(metavar="N", help="Seed of everything that is random.")]
Quorum = Annotated[
    str | None, typer.Option(metavar="N", help="Updates a round needs: a count, or a share below 1 of the clients.")
]
Epsilon = Annotated[
    str | None,
    typer.Option(metavar="E", help="Client-level differential privacy: the budget; it decides the noise."),
]
OnDivergence = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT", help="stop (default) or warn: what to do if the loss is not finite or accuracy falls to chance."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting, e.g. training.lr=0.05; repeatable."),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML file of an experiment; other options override it.")
]
RunOut = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the run; default runs/<name and time>.")]
Resume = Annotated[Path | None, typer.Option(metavar="DIR", help="Resume the run in this directory.")]
Workers = Annotated[str | None, typer.Option(metavar="N", help="Worker processes; default: all cores.")]
Engine = Annotated[
    str, typer.Option(metavar="ENGINE", help="processes, or ray: actors on the cluster that RAY_ADDRESS names.")
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or mps.")]
Target = Annotated[
    float | None, typer.Option(metavar="PERCENT", help="Report rounds and bytes until the goal reaches this, e.g. 80.")
]
Goal = Annotated[
    str | None,
    typer.Option(
        metavar="FIGURE",
        help="The figure that counts: accuracy, balanced, f1, auroc, auprc, ece, loss, personal, worst, ...; "
        "default: accuracy, or balanced accuracy if the test set is not balanced.",
    ),
]

MOST_SEEDS = 1000  # in one range of --seeds

# options that set a setting of another name
SETTING_OF = {
    "method": "method.name",
    "dropout": "trouble.dropout",
    "fault": "trouble.fault",
    "quorum": "trouble.quorum",
    "diagnose": "evaluation.diagnose",
    "metric": "evaluation.metric",
    "epsilon": "privacy.epsilon",
}


def given_settings(**options: Any) -> dict[str, Any]:
    """The settings that options stand for, such as `trouble.quorum`; options that are None were not given."""
    return {SETTING_OF.get(name, name): value for name, value in options.items() if value is not None}


def check_resume(path: Path, *given: Any) -> None:
    """--resume runs the experiment as it was: raise `UsageError` if anything that would change it is given too."""
    if any(given):
        raise UsageError(f"--resume runs {path} with its own settings; it cannot be combined with other settings.")


def read_experiment(config: Path | None, settings: dict[str, Any], assignments: list[str] | None) -> Experiment:
    """The settings of a file, overridden by those of options, overridden by `--set name=value`."""
    from fedskew.experiment.config import from_dict, read_toml
    from fedskew.experiment.given import method_table

    values, settings = read_toml(config) if config is not None else {}, dict(settings)
    if isinstance(values.get("method"), str):
        values["method"] = method_table(values["method"])
    if "method.name" in settings:
        chosen = method_table(settings.pop("method.name"))
        same = values.get("method", {}).get("name") == chosen["name"]
        values["method"] = values["method"] | chosen if same else chosen  # settings of another method do not apply
    for key, value in settings.items():
        assign(values, key, value)
    for text in assignments or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} is invalid: expected name=value, as in --set training.lr=0.05.")
        assign(values, key.strip(), plain_value(value.strip()))
    return from_dict(values)


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `training.lr` in nested tables, in place."""
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UsageError(f"{key} is invalid: {table} is a single setting, not a table.")
    values[name] = value


def plain_value(text: str) -> Any:
    """A TOML value (a number, true, [1, 2]), or the text itself if it is not one."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def stop_rule(text: str | None) -> dict[str, str]:
    """`patience=10,figure=f1` gives the settings of the table `stop`; None gives none."""
    if text is None:
        return {}
    from fedskew.core.settings import parse

    wrong = UsageError(f"--stop {text} is invalid: expected patience=10, with figure=... and min_delta=... if wanted.")
    if "=" not in text:
        raise wrong
    (_, options), *more = parse(f"stop:{text}", "--stop")
    if more or "patience" not in options:
        raise wrong
    return options


def robust_rule(text: str | None) -> dict[str, str]:
    """`median:attackers=2,mixing=nnm` gives the settings of the table `robust`; None gives none."""
    if text is None:
        return {}
    from fedskew.core.settings import parse

    (rule, options), *more = parse(text, "--robust")
    if more:
        raise UsageError(f"--robust {text} is invalid: expected one rule, as in median:attackers=2,mixing=nnm.")
    return {"rule": rule, **options}


def seed_list(text: str) -> list[int]:
    """`0,1,2` and `0-2` give [0, 1, 2]. A seed that is named twice counts once."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--seeds {text} is invalid: expected whole numbers, as in 0,1,2 or 0-4.")
        low, high = int(first), int(last or first)
        if not low <= high < low + MOST_SEEDS:
            raise UsageError(
                f"--seeds {text} is invalid: expected a range from low to high of at most {MOST_SEEDS}, as in 0-4."
            )
        seeds |= dict.fromkeys(range(low, high + 1))
    return list(seeds)


def run_options(
    workers: str | None, engine: str, device: str, data_dir: Path | None, track: list[str] | None = None
) -> dict[str, Any]:
    """Keyword arguments of `Run` that say where and how to run; mistakes in them are a `UsageError`.

    More workers than cores become as many as there are cores, and a line on stderr says so.
    """
    from fedskew.experiment.machine import pick_device, worker_count
    from fedskew.experiment.tracking import trackers
    from fedskew.federation.simulate.ray import import_ray

    trackers(track or [])
    check_choice("--engine", engine, "processes", "ray")
    if engine == "ray":
        import_ray()
    given: Any = int(workers) if workers is not None and workers.isdecimal() else workers
    count, notes = worker_count(given, "ray" if engine == "ray" else "processes")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return {
        "workers": count,
        "engine": engine,
        "device": pick_device(device),
        "data_dir": data_dir,
        "track": tuple(track or ()),
    }


def check_choice(option: str, given: str, *choices: str) -> None:
    """Raise `UsageError` if an option's value is none of these."""
    if given not in choices:
        raise UsageError(f"{option} {given} is invalid: expected {' or '.join(choices)}.")


def default_out(experiment: Experiment) -> Path:
    """runs/<method>-<data>-<time>: a new directory for a run, another one for each microsecond."""
    name = Path(str(experiment.data)).stem if experiment.data else "data"
    return Path("runs") / f"{experiment.method_name}-{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def comparison_out(base: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> Path:
    """runs/compare-<data>-<code>: a folder for this comparison. The same comparison has the same folder."""
    settings = {key: value for key, value in base.as_dict().items() if key not in ("method", "seed")}
    told = json.dumps([settings, sorted(methods), sorted(seeds)], sort_keys=True, default=str)
    name = Path(str(base.data)).stem if base.data else "data"
    return Path("runs") / f"compare-{name}-{sha256(told.encode())[:8]}"
