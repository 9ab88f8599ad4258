"""Choose the learning rate of an experiment on validation data, with a seed that no table uses. No test sample is used.

A baseline at the learning rate somebody else found for their method is a weak baseline. Tables and boards give it a
few rates and the same number of runs as any method they compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.execution import execute
from fedskew.studies.tune import accuracy_goal, criterion, on_validation

SEED = 1000  # of the split, the initial model and the batches

Watch = Callable[[Run, Record], None]  # called after each round


def choose_rate(
    experiment: Experiment, rates: Sequence[float], out: Path, watch: Watch | None = None, **options: Any
) -> float:
    """The learning rate whose run ends best on the validation parts of all clients.

    Args:
        experiment: what the rate is for; its seed and learning rate are replaced.
        rates: the candidates. A run that diverges loses to any that does not.
        out: folder of the runs, one directory each; interrupted runs are resumed, finished ones read.
        watch: called with the run and the record of each round that is run now.
        options: how to run (see `Run`).
    """
    goal = accuracy_goal(experiment.method.has_global)
    found: dict[float, float] = {}
    for rate in rates:
        trial = on_validation(replace(experiment, training=replace(experiment.training, lr=rate)), SEED)
        outcome = execute(trial, out / f"lr{rate:g}", watch, **options)
        if not outcome.failed and outcome.result is not None and outcome.result.metrics is not None:
            value = criterion(outcome.result.metrics, goal)
            assert value is not None  # accuracies always are
            found[rate] = value
    if not found:
        raise UsageError(
            f"{experiment.method_name} diverged with each of the learning rates {', '.join(f'{r:g}' for r in rates)}."
        )
    return max(found, key=lambda rate: found[rate])
