"""Figures computed from the records of rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedskew.evaluation.metrics import Metrics, ModelMetrics
from fedskew.evaluation.rounds import to_target
from helpers.records import a_record


def test_rounds_and_bytes_to_a_target_count_both_ways_up_to_the_first_hit() -> None:
    def record(round: int, accuracy: float | None) -> SimpleNamespace:
        shared = accuracy and ModelMetrics(accuracy=accuracy, loss=0.0, per_class=[])
        metrics = Metrics(global_=shared) if shared else None
        return SimpleNamespace(round=round, bytes_up={"p": 10}, bytes_down={"p": 5}, metrics=metrics)

    records = [record(0, 0.1), record(1, None), record(2, 0.6), record(3, 0.9)]
    assert to_target(records, 0.5) == to_target(records, 0.6) == {"rounds": 3, "bytes": 45}
    assert to_target(records, 0.95) == {"rounds": None, "bytes": None}


def test_a_figure_that_should_be_low_reaches_its_target_from_above() -> None:
    def record(round: int, ece: float) -> Any:
        shared = ModelMetrics(accuracy=0.5, loss=1.0, per_class=[0.5], ece=ece)
        return a_record(round, metrics=Metrics(global_=shared))

    assert to_target([record(0, 0.3), record(1, 0.1), record(2, 0.05)], 0.1, "ece")["rounds"] == 2
