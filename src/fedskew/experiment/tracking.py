"""Experiment trackers: TensorBoard, MLflow, Weights & Biases.

A tracker gets the settings first, then one set of named numbers per round. It never influences a run: results are
bit-identical with and without trackers, and the run continues if a tracker fails.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fedskew.core.settings import choose, library
from fedskew.evaluation.rounds import round_costs
from fedskew.federation.protocol import Record

log = logging.getLogger("fedskew")
IDENTIFIERS = "track.json"  # in a run's directory: the name by which each tracker knows the run


class Tracker(Protocol):
    """Receives a run's settings and records."""

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        """A run starts (`first` is 0) or is resumed at round `first`. `folder` is the run's directory."""
        ...

    def record(self, figures: dict[str, float], step: int) -> None:
        """The numbers of one round, by name (see `scalars`); `step` is the round, counted from 1."""
        ...

    def close(self) -> None:
        """The run ended or stopped."""
        ...


class TensorBoard:
    """Writes event files to `<run>/tensorboard`; view them with `tensorboard --logdir runs`."""

    def __init__(self) -> None:
        self.package = library("tensorboardX", "tensorboard")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        # file names contain the second of their creation: the suffix keeps a quick resume from reusing the name
        self.writer = self.package.SummaryWriter(
            str(folder / "tensorboard"), purge_step=first + 1 if first else None, filename_suffix=f".{first}"
        )
        self.writer.add_text("settings", f"```json\n{json.dumps(settings, indent=1)}\n```")

    def record(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """Logs a run of the experiment `fedskew` to MLFLOW_TRACKING_URI, or to ./mlruns if that is not set."""

    def __init__(self) -> None:
        self.package = library("mlflow", "mlflow")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.package.set_tracking_uri(Path("mlruns").absolute().as_uri())
        self.package.set_experiment("fedskew")
        known = identifier(folder, "mlflow", lambda: "") if first else ""
        run = self.package.start_run(run_id=known or None, run_name=None if known else folder.name)
        if not known:
            identifier(folder, "mlflow", lambda: str(run.info.run_id), renew=True)
            self.package.log_params(flat(settings))

    def record(self, figures: dict[str, float], step: int) -> None:
        self.package.log_metrics(figures, step=step)

    def close(self) -> None:
        self.package.end_run()


class WandB:
    """Logs a run of the project `fedskew`; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        self.package = library("wandb", "wandb")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        name = identifier(folder, "wandb", lambda: uuid.uuid4().hex[:12], renew=not first)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = self.package.init(
            project="fedskew", id=name, name=folder.name, config=settings, dir=str(folder), resume="allow"
        )

    def record(self, figures: dict[str, float], step: int) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def trackers(names: Sequence[str]) -> list[Tracker]:
    """Trackers by name, or one tracker. Raises `UsageError` for an unknown name or a package that is not installed."""
    return [choose("tracker", name, TRACKERS)() for name in ([names] if isinstance(names, str) else names)]


def identifier(folder: Path, tracker: str, make: Callable[[], str], *, renew: bool = False) -> str:
    """The name by which a tracker knows the run in this folder. If there is none, or with `renew`, `make` makes one."""
    path = folder / IDENTIFIERS
    names: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if renew or tracker not in names:
        names[tracker] = make()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(names))
    return names[tracker]


def flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one: {"a": {"b": 1}} gives {"a/b": 1}. `above` is put before every key."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        made |= flat(value, f"{above}{key}/") if isinstance(value, dict) else {f"{above}{key}": value}
    return made


def scalars(record: Record) -> dict[str, float]:
    """The numbers of one record, by name.

    Metrics are named by their place (global/accuracy, see `fedskew.evaluation.figures`), what clients report about
    training training/<name>, and costs cost/<key>. Lists, such as accuracies by class, are left out.
    """
    metrics = {} if record.metrics is None else msgspec.to_builtins(record.metrics)
    everything = {**metrics, "training": record.training, "cost": round_costs(record)}
    return {
        name: float(value)
        for name, value in flat(everything).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@contextmanager
def tracked(
    trackers: list[Tracker], folder: Path, settings: dict[str, Any], first: int
) -> Iterator[Callable[[Record], None]]:
    """Keep trackers open during a run; call what is yielded with each record.

    A tracker that raises is logged as a warning and left out from then on.
    """
    active: list[Tracker] = []

    def each(chosen: list[Tracker], act: Callable[[Tracker], None]) -> None:
        for tracker in list(chosen):
            try:
                act(tracker)
            except Exception as error:
                log.warning("%s failed and is left out: %s", type(tracker).__name__, error)
                if tracker in active:
                    active.remove(tracker)
            else:
                if tracker not in active:
                    active.append(tracker)

    def send(record: Record) -> None:
        figures = scalars(record)
        each(active, lambda tracker: tracker.record(figures, record.number))

    each(trackers, lambda tracker: tracker.begin(folder, settings, first))
    try:
        yield send
    finally:
        each(active, lambda tracker: tracker.close())
