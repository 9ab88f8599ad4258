"""The files of a run's directory that its model is used with: model.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.experiment.card import ModelCard
from fedskew.experiment.run_directory import (
    CARD,
    MODEL,
    RESULT,
    SETTINGS,
    is_finished,
    is_run,
    read_result,
    read_tensors,
)
from fedskew.federation.wire import digest


def read_card(path: Path) -> ModelCard | None:
    """What one must know to use the model of the run in a folder; None if an earlier version wrote the run."""
    if not (path / CARD).exists():
        return None
    try:
        return msgspec.json.decode((path / CARD).read_bytes(), type=ModelCard)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path / CARD} cannot be read: {error}.") from None


def read_model(path: Path) -> Payload:
    """The global model of the finished run in a folder; UsageError if it is not the one that the run ended with."""
    if not is_run(path):
        raise UsageError(f"{path} holds no run: there is no {SETTINGS} in it.")
    if not is_finished(path):
        raise UsageError(f"the run in {path} is not finished: resume it with fedskew run --resume {path}.")
    model = read_tensors(path / MODEL)
    try:
        expected = read_result(path / RESULT).model_digest
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / RESULT} cannot be read: {error}.") from None
    if digest(model) != expected:
        raise UsageError(f"{path / MODEL} is not the model that the run ended with: its digest is another.")
    return model
