"""A figure of the user's own: a function in a Python file, given as `--metric my.py:name`.

    def cost(y_true, scores):        # [n] class numbers, [n, classes] probabilities, NumPy arrays
        said = scores.argmax(1)
        return 10 * ((y_true == 1) & (said == 0)).mean() + ((y_true == 0) & (said == 1)).mean()

It is computed from the global model's predictions on the server's test set, after every evaluation. There is none for
clients' test parts: the function needs all predictions at once, and those of clients are only counted. The file is
run by `fedskew run`, so it must be one that you trust.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedskew.core.net import outputs
from fedskew.core.samples import pieces
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.evaluation.scores import BATCH
from fedskew.federation.world import World

Function = Callable[[Any, Any], float]


def load_metric(text: str, world: World) -> Callable[[int, Payload], float | None]:
    """The figure as a function of (round, broadcast), from `my.py:name`; mistakes are a `UsageError`."""
    if not len(world.y_test) or not world.method.has_global:
        raise UsageError(
            f"--metric {text} needs a global model and a test set on the server; this run lacks one of them."
        )
    function = _function(text)

    def figure(round: int, broadcast: Payload) -> float | None:
        y, scores = predict_test_set(world, round, broadcast)
        try:
            value = float(function(y, scores))
        except Exception as error:
            raise UsageError(f"--metric {text} failed: {type(error).__name__}: {error}") from None
        return value if math.isfinite(value) else None

    return figure


def _function(text: str) -> Function:
    path, colon, name = text.rpartition(":")
    file = Path(path)
    if not colon or not name.isidentifier() or file.suffix != ".py":
        raise UsageError(f"--metric {text} is invalid: expected a Python file and a function in it, as in my.py:name.")
    if not file.is_file():
        raise UsageError(f"--metric {text}: there is no file {file}.")
    spec = importlib.util.spec_from_file_location("fedskew_own_metric", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--metric {text}: {file} cannot be run: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--metric {text}: {file} has no function {name}.")
    checked: Function = function
    return checked


@torch.no_grad()
def predict_test_set(world: World, round: int, broadcast: Payload) -> tuple[Any, Any]:
    """Labels [n] and the global model's probabilities [n, classes] on the server's test set, as NumPy arrays."""
    site = world.server_site(round, "evaluate")
    site.load(broadcast)
    local = world.training.batch_norm == "local"
    parts = [
        outputs(site.net, site.net, site.data.take(p)[0].to(world.device), batch_statistics=local).softmax(1).cpu()
        for p in pieces(len(site.data), BATCH)
    ]
    return site.data.labels.numpy(), torch.cat(parts).numpy()
