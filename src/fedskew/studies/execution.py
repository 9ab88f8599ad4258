"""One run of a study: carried out, resumed, or read from its directory if it is already finished.

Comparisons, published tables and searches all run their experiments through `execute`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.result import Result, result_of
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import is_finished, is_run, read_run, read_settings
from fedskew.federation.protocol import QuorumLost, Record

Watch = Callable[[Run, Record], None]  # called after each round of a run


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    result: Result | None  # the final figures, or those so far if it failed; None if no round was finished
    records: list[Record]  # one per finished round
    failed: str = ""  # why the run has no final figures; "" if it finished
    no_data: bool = False  # it was not run, because its data set is not available


def execute(experiment: Experiment, path: Path | None, watch: Watch | None = None, **options: Any) -> Outcome:
    """Run an experiment in the directory `path`: resume it if it was interrupted, read it if it is finished.

    A directory that holds a run with other settings is a `UsageError`. A run that diverges or loses its
    quorum does not raise: the study continues with the others, and `Outcome.failed` says why.

    Args:
        experiment: what to run.
        path: the run's directory; None runs in memory and writes nothing.
        watch: called with the run and the record of each round that is run now.
        options: how to run it: workers, engine, device, data_dir, track (see `Run`).
    """
    started = path is not None and is_started(path, experiment)
    if path is not None and is_finished(path):
        saved = read_run(path)
        return _finished(experiment, saved.result, saved.records)
    run = Run(experiment, out=path, resume=started, **options)
    try:
        for record in run:
            if watch is not None:
                watch(run, record)
    except QuorumLost as lost:
        return Outcome(result_of(experiment, run.records) if run.records else None, run.records, failed=str(lost))
    return _finished(experiment, run.result, run.records)


def _finished(experiment: Experiment, result: Result | None, records: list[Record]) -> Outcome:
    """The outcome of a finished run; one that was stopped because it diverged has failed."""
    stopped = result is not None and experiment.on_divergence == "stop"
    return Outcome(result, records, failed=result.diverged if stopped and result is not None else "")


def is_started(path: Path, experiment: Experiment) -> bool:
    """Whether the directory holds a run of this experiment. A run with other settings is a `UsageError`."""
    if not is_run(path):
        return False
    if read_settings(path).as_dict() != experiment.as_dict():
        raise UsageError(f"{path} holds a run with other settings; give another --out or remove it.")
    return True


def file_name(text: str) -> str:
    """A text as part of a file's name: `fedprox:mu=0.1` gives `fedprox-mu0.1`."""
    return re.sub(r"[^\w.-]+", "-", text.replace("=", "")).strip("-")
