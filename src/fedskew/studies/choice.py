"""Choose the learning rate of an experiment on validation data, with a seed that no table uses. No test sample is used.

A baseline at the learning rate somebody else found for their method is a weak baseline. Tables and boards give it a
few rates and the same number of runs as any method they compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.protocol import Record
from fedskew.studies.execution import Outcome, execute
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
    found: dict[float, float] = {}
    for rate in rates:
        outcome = execute(rate_trial(experiment, rate), out / f"lr{rate:g}", watch, **options)
        value = trial_value(outcome, accuracy_goal(experiment.method.has_global))
        if value is not None:
            found[rate] = value
    if not found:
        raise UsageError(
            f"{experiment.method_name} diverged with each of the learning rates {', '.join(f'{r:g}' for r in rates)}."
        )
    return best_rate(found)


def rate_trial(experiment: Experiment, rate: float) -> Experiment:
    """The run that tries a learning rate: evaluated once, on validation data, with the seed that no table uses."""
    return on_validation(replace(experiment, training=replace(experiment.training, lr=rate)), SEED)


def trial_value(outcome: Outcome, goal: str | None) -> float | None:
    """What a trial came to (see `criterion`); None if it diverged."""
    if outcome.failed or outcome.result is None or outcome.result.metrics is None:
        return None
    return criterion(outcome.result.metrics, goal)


def best_rate(found: Mapping[float, float]) -> float:
    """The learning rate with the best value; the first of them if several have it."""
    return max(found, key=lambda rate: found[rate])
