"""Records and results made up for tests of what reads them."""

from __future__ import annotations

from typing import Any

from fedskew.evaluation.metrics import ClientMetrics, Metrics, ModelMetrics
from fedskew.experiment.result import Result
from fedskew.federation.protocol import Record


def global_accuracy(accuracy: float | None) -> Metrics | None:
    """An evaluation of the global model alone; None if it has no accuracy."""
    if accuracy is None:
        return None
    return Metrics(global_=ModelMetrics(accuracy=accuracy, loss=1.0, per_class=[accuracy]))


def over_clients(**figures: Any) -> ClientMetrics:
    """Figures over clients; what is not given is 0."""
    blank: dict[str, Any] = {"mean": 0.0, "weighted": 0.0, "std": 0.0, "worst_decile": 0.0, "loss": 0.0}
    return ClientMetrics(**blank | {"per_class": [], "clients": 1} | figures)


def a_record(round: int, accuracy: float | None = None, **fields: Any) -> Record:
    """A round of one client, evaluated if it has an accuracy."""
    blank: dict[str, Any] = {"stage": "train", "cohort": [0], "trained": [0], "lost": {}, "bytes_down": {}}
    blank |= {"bytes_up": {}, "client_seconds": 0.0, "server_seconds": 0.0, "evaluate_seconds": 0.0, "seconds": 0.0}
    return Record(round=round, **blank | {"training": {}, "metrics": global_accuracy(accuracy)} | fields)


def a_result(accuracy: float | None = None, **fields: Any) -> Result:
    """The result of a run that ended with this accuracy of the global model."""
    blank: dict[str, Any] = {"method": "fedavg", "seed": 0, "rounds": 1, "bytes_up": 0, "bytes_down": 0, "lost": 0}
    blank |= {"client_seconds": 0.0, "server_seconds": 0.0, "seconds": 0.0, "settings": {}}
    return Result(accuracy=accuracy, metrics=global_accuracy(accuracy), **blank | fields)
