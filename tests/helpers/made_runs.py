"""Directories of runs made up for tests of what looks at them: no training, any number of rounds and clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from fedskew.evaluation.metrics import Metrics, ModelMetrics, Population
from fedskew.experiment.live import append_clients
from fedskew.federation.protocol import Record
from helpers.records import a_record, over_clients

PLAIN = {"data": "digits", "split": "iid:clients=2", "rounds": 10, "seed": 0, "method": {"name": "fedavg"}}


def metrics(accuracy: float, **detail: Any) -> Metrics:
    """An evaluation of the global model on two classes, and of two clients."""
    shared = ModelMetrics(accuracy=accuracy, loss=1.0, per_class=[accuracy, 1 - accuracy], **detail)
    own = over_clients(mean=accuracy, worst_decile=accuracy / 2, per_class=[accuracy, accuracy], clients=2)
    return Metrics(global_=shared, clients=Population(global_=None, personal=own, never_trained=0, sampled=False))


def make_run(path: Path, rounds: int = 0, **settings: Any) -> Path:
    """A run's directory with settings and the first `rounds` records."""
    path.mkdir(parents=True)
    (path / "settings.toml").write_text(tomli_w.dumps(PLAIN | settings))
    (path / "records.jsonl").touch()
    for round in range(rounds):
        add_round(path, round)
    return path


def add_round(path: Path, round: int, accuracy: float = 0.5, **fields: Any) -> Record:
    """Append the record of a round (counted from 0) of ten seconds, and two clients' figures."""
    blank: dict[str, Any] = {"seconds": 10.0, "training": {"loss": 1.0}, "metrics": metrics(accuracy)}
    record = a_record(round, **blank | fields)
    with (path / "records.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(record.as_dict()) + b"\n")
    append_clients(path, round, {0: (accuracy, 0.5), 1: (accuracy / 2, 2.0)}, 2)
    return record
