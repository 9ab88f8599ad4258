"""Trackers people already use, as further readers of a run's records: TensorBoard, MLflow, Weights & Biases.

A tracker gets one set of named numbers a round, the settings first and the closing figures last. It only
listens: a run has the same bits with and without, and goes on when a tracker fails.
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

from fedskew.core.settings import choose, library

log = logging.getLogger("fedskew")
MEMORY = "track.json"  # in a run's directory: under which name each tracker knows the run


class Tracker(Protocol):
    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        """A run starts, or is taken up at round `first`."""
        ...

    def record(self, figures: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `<run>/tensorboard`: tensorboard --logdir runs"""

    def __init__(self) -> None:
        self.package = library("tensorboardX", "tensorboard")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        # a file's name holds the second it was begun in: the suffix keeps what was taken up at once apart
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
    """A run of the experiment `fedskew`, where MLFLOW_TRACKING_URI says, else in ./mlruns."""

    def __init__(self) -> None:
        self.package = library("mlflow", "mlflow")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.package.set_tracking_uri(Path("mlruns").absolute().as_uri())
        self.package.set_experiment("fedskew")
        known = remembered(folder, "mlflow", lambda: "") if first else ""
        run = self.package.start_run(run_id=known or None, run_name=None if known else folder.name)
        if not known:
            remembered(folder, "mlflow", lambda: str(run.info.run_id), anew=True)
            self.package.log_params(flat(settings))

    def record(self, figures: dict[str, float], step: int) -> None:
        self.package.log_metrics(figures, step=step)

    def close(self) -> None:
        self.package.end_run()


class WandB:
    """A run of the project `fedskew`; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        self.package = library("wandb", "wandb")

    def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
        name = remembered(folder, "wandb", lambda: uuid.uuid4().hex[:12], anew=not first)
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
    """By name; one whose package is missing is said at once."""
    return [choose("tracker", name, TRACKERS)() for name in names]


def remembered(folder: Path, tracker: str, make: Callable[[], str], *, anew: bool = False) -> str:
    """The name a tracker gave this run, or a new one."""
    path = folder / MEMORY
    names: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if anew or tracker not in names:
        names[tracker] = make()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(names))
    return names[tracker]


def flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        made |= flat(value, f"{above}{key}/") if isinstance(value, dict) else {f"{above}{key}": value}
    return made


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of one record, by name: metrics in the words of evaluate.py, training/..., cost/..."""
    costs = {key: record[key] for key in ("client_seconds", "server_seconds", "seconds")}
    costs |= {key: sum(record[key].values()) for key in ("bytes_up", "bytes_down")} | {"lost": len(record["lost"])}
    everything = {**(record["metrics"] or {}), "training": record["training"], "cost": costs}
    return {
        name: float(value)
        for name, value in flat(everything).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@contextmanager
def tracked(
    trackers: list[Tracker], folder: Path, settings: dict[str, Any], first: int
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A run's trackers while it lasts, from round `first` on; call what is yielded with each record."""
    listening: list[Tracker] = []

    def each(asked: list[Tracker], act: Callable[[Tracker], None]) -> None:
        for tracker in list(asked):
            try:
                act(tracker)
            except Exception as error:
                log.warning("%s failed and is left out: %s", type(tracker).__name__, error)
                if tracker in listening:
                    listening.remove(tracker)
            else:
                if tracker not in listening:
                    listening.append(tracker)

    def tell(record: dict[str, Any]) -> None:
        figures = scalars(record)
        each(listening, lambda tracker: tracker.record(figures, record["round"] + 1))

    each(trackers, lambda tracker: tracker.begin(folder, settings, first))
    try:
        yield tell
    finally:
        each(listening, lambda tracker: tracker.close())
