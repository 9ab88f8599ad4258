"""Whether a run may be resumed with the settings it has now: unchanged, or with more rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.tracking import flat


def check_settings(before: Mapping[str, Any], experiment: Experiment, done: int) -> None:
    """Raise UsageError unless a run with the settings `before` may go on as `experiment` after `done` rounds.

    More rounds are allowed where the rounds so far are those of a run that had them from the start.
    """
    changed = _changes(before, experiment)
    if more := {key: pair for key, pair in changed.items() if key != "rounds"}:
        key, (was, now) = next(iter(more.items()))
        raise UsageError(
            f"the settings were changed after the run began: {key} was {was} and is {now}; "
            "change it back to resume, or start a new run."
        )
    if changed:
        check_rounds(int(changed["rounds"][0]), experiment, done)


def _changes(before: Mapping[str, Any], experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """Settings that differ: name -> (before, now). None stands for a setting that is not there."""
    was, now = dict(before), experiment.as_dict()
    if was != now:
        # A newer version may have settings that the run did not have: they had their defaults.
        with contextlib.suppress(UsageError):  # a method of the user's own is in no registry
            was, now = from_dict(was).as_dict(), from_dict(now).as_dict()
    was, now = flat(was), flat(now)
    keys = [*now, *(key for key in was if key not in now)]
    return {key: (was.get(key), now.get(key)) for key in keys if was.get(key) != now.get(key)}


def check_rounds(before: int, experiment: Experiment, done: int) -> None:
    """Raise UsageError unless `done` rounds of a run planned with `before` rounds are those of `experiment`."""
    after, method, training = experiment.rounds, experiment.method, experiment.training
    cannot = f"the run cannot go from {before} to {after} rounds"
    stages = method.stages(before), method.stages(after)
    if len(stages[1]) < done:
        raise UsageError(f"{cannot}: {done} are finished; expected more.")
    if list(stages[0][:done]) != list(stages[1][:done]):
        raise UsageError(
            f"{cannot}: its last rounds were of the stage '{stages[0][done - 1]}' of {experiment.method_name}, "
            "which comes after the last training round; start a new run."
        )
    totals = len(stages[0]), len(stages[1])
    if any(training.rate(round, totals[0]) != training.rate(round, totals[1]) for round in range(done)):
        raise UsageError(
            f"{cannot}: the learning rates so far followed the schedule '{training.schedule}' over the planned "
            "rounds; start a new run."
        )
    if experiment.privacy.epsilon is not None and totals[0] != totals[1]:
        raise UsageError(
            f"{cannot}: the noise of the rounds so far was chosen so that {totals[0]} rounds use up "
            f"privacy.epsilon={experiment.privacy.epsilon:g}; start a new run."
        )
    if method.depends_on_rounds and totals[0] != totals[1]:
        raise UsageError(
            f"{cannot}: what {experiment.method_name} computes in a round depends on the number of rounds; "
            "start a new run."
        )
