"""Frozen features: a data set's samples as the features of a net that does not train any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedskew.core.net import Net
from fedskew.core.samples import Data, pieces
from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, Arrays, DataSet
from fedskew.experiment.nets import model_text, net_builder
from fedskew.experiment.run_directory import is_run
from fedskew.experiment.use import load

BATCH = 200


def embed(data: DataSet, model: str, *, head: str = "", seed: int = 0) -> Arrays:
    """The samples of a data set as features, with their labels and owners, in the form of an .npz data set.

    data: images or vectors.
    model: the directory of a finished run, or a net: its name, or `my.py:name` for one that you load yourself.
    head: the last layer of your own net, which is left out; "" finds it.
    seed: decides the initial values of a net by name.
    """
    if data.columns:
        raise UsageError(f"{data.name} is a table, which has no features to compute: train on it directly.")
    net, mean, std = _net(data, model, head, seed)
    made: Arrays = {}
    for part, x, y, owners in (
        ("train", data.x_train, data.y_train, data.owners_train),
        ("test", data.x_test, data.y_test, data.owners_test),
    ):
        if len(y):
            made |= {f"x_{part}": _features(net, x, y, mean, std), f"y_{part}": _labels(data, y)}
            made |= {f"u_{part}": owners} if owners is not None else {}
    return made


def _net(data: DataSet, model: str, head: str, seed: int) -> tuple[Net, tuple[float, ...], tuple[float, ...]]:
    """The net, and the normalisation of its inputs."""
    if is_run(Path(model)):
        trained = load(model)
        if trained.batch_statistics:
            raise UsageError(f"the model of {model} has no batch-norm statistics, so its features depend on the batch.")
        if trained.card.shape != data.shape:
            raise UsageError(f"{data.name} does not fit the model of {model}: expected {trained.card.expects()}.")
        return trained.net, trained.card.mean, trained.card.std
    text = model_text(model, data.shape)
    return net_builder(text, data.shape, data.classes, seed, True, head)().eval(), data.mean, data.std


@torch.no_grad()
def _features(net: Net, x: Array, y: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    samples = Data(torch.from_numpy(x), torch.from_numpy(y), torch.arange(len(y)), mean, std)
    with one_thread():
        found = torch.cat([net.body(samples.take(part)[0]) for part in pieces(len(y), BATCH)])
    return found.flatten(1).float().numpy()


def _labels(data: DataSet, y: Array) -> Array:
    """Labels by name where classes have names, so that they keep them."""
    return np.array(data.labels)[y] if data.labels else y
