"""Makes the world of a run: from a data set that is split among clients, or from tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.core.method import Method
from fedskew.core.training import Training
from fedskew.data.dataset import DataSet
from fedskew.data.split.features import changed_samples
from fedskew.data.split.partition import Partition, Parts
from fedskew.federation.world import Ragged, World


def make_world(
    data: DataSet,
    partition: Partition,
    parts: Sequence[Parts],
    *,
    method: Method,
    training: Training,
    make_net: Callable[[], Any],
    seed: int,
    rounds: int,
    fast: bool = True,
    device: str = "cpu",
    min_count: int = 1,
) -> World:
    """The world of a data set that is split among clients.

    `partition` is the split; `parts` divides each client's share into training, validation and test samples.
    """
    x, y = changed_samples(data.x_train, data.y_train, partition, data.classes)
    return World(
        method=method,
        training=training,
        make_net=make_net,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        x_test=torch.from_numpy(data.x_test),
        y_test=torch.from_numpy(data.y_test),
        train=Ragged.of([p.train for p in parts]),
        validation=Ragged.of([p.validation for p in parts]),
        test=Ragged.of([p.test for p in parts]),
        public=torch.from_numpy(partition.public),
        classes=data.classes,
        seed=seed,
        rounds=rounds,
        mean=data.mean,
        std=data.std,
        noise=partition.noise,
        rotation=partition.rotation,
        fast=fast,
        device=device,
        min_count=min_count,
    )


def world_from_tensors(
    method: Method,
    training: Training,
    make_net: Callable[[], Any],
    x: Tensor,
    y: Tensor,
    clients: Sequence[np.ndarray[Any, np.dtype[np.int64]]],
    *,
    classes: int,
    rounds: int,
    seed: int = 0,
    public: Tensor | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> World:
    """A world from tensors, for experiments in code. Clients have no validation and no test samples.

    `clients` are each client's indices into `x` and `y`, `public` those of the server (None: none), and `test` is
    the server's test set (None: none). Further options are fields of `World`.
    """
    x_test, y_test = (x[:0], y[:0]) if test is None else test
    no_samples = Ragged.of([np.empty(0, np.int64)] * len(clients))
    return World(
        method=method,
        training=training,
        make_net=make_net,
        x=x,
        y=y,
        x_test=x_test,
        y_test=y_test,
        train=Ragged.of(clients),
        validation=no_samples,
        test=no_samples,
        public=torch.empty(0, dtype=torch.int64) if public is None else public,
        classes=classes,
        seed=seed,
        rounds=rounds,
        **options,
    )
