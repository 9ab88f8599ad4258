"""Whether a run may be resumed: its settings must be unchanged but for more rounds, its data the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedskew.core.settings import UsageError
from fedskew.core.user_code import split_text
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.tracking import flat
from fedskew.federation.world import World

WHOLE = 1 << 24  # bytes of samples up to which all count in `data_mark`; of more, about so many do


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


def data_mark(world: World) -> str:
    """Identifies the samples of a run: 16 hexadecimal digits of a SHA-256. Of large data every n-th sample counts."""
    sha = hashlib.sha256()
    for x, y in ((world.x, world.y), (world.x_test, world.y_test)):
        step = 1 + x.numel() * x.element_size() // WHOLE
        for tensor in (x[::step], y):
            sha.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            sha.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def code_marks(experiment: Experiment) -> dict[str, str]:
    """The files of the user's own code that a run uses, each with its SHA-256; {}: it uses none, or they are gone."""
    named = (experiment.method_name, experiment.model, experiment.evaluation.metric)
    files = [text[0].rpartition(":")[0] for one in named if isinstance(one, str) and (text := split_text(one))]
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if Path(file).is_file()}


def check_data(before: str, now: str) -> None:
    """Raise UsageError if the samples are others than when the run began; "" is not known."""
    if before and now and before != now:
        raise UsageError(
            "the data were changed after the run began: its rounds so far used other samples; "
            "bring them back to resume, or start a new run."
        )
