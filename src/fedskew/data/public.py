"""A public set D0 of the user's own, on the server, in place of one that the split cuts from the clients' pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet
from fedskew.data.split.chain import Partition


def with_public(data: DataSet, partition: Partition, public: DataSet) -> tuple[DataSet, Partition]:
    """The pool with D0's samples (train and test parts together) behind the clients', and a deal that says so."""
    if len(partition.public):
        raise UsageError(
            f"the server has two public sets, {public.name} and the {len(partition.public)} samples that the split "
            "sets aside: leave out public= or the split's public:..."
        )
    own = replace(public, owners_train=None).pooled()
    if (own.x_train.dtype, own.shape) != (data.x_train.dtype, data.shape):
        raise UsageError(f"the public set {own.name} has {_samples(own)}, {data.name} has {_samples(data)}.")
    if own.classes != data.classes or (own.labels and own.labels != _names(data)):
        raise UsageError(f"the public set {own.name} has {_classes(own)}, {data.name} has {_classes(data)}.")
    x, y = np.concatenate([data.x_train, own.x_train]), np.concatenate([data.y_train, own.y_train])
    return replace(data, x_train=x, y_train=y), replace(partition, public=np.arange(len(data.y_train), len(y)))


def _samples(data: DataSet) -> str:
    kind = "images" if data.x_train.dtype == np.uint8 else "vectors"
    return f"{kind} of shape {'x'.join(map(str, data.shape))}"


def _names(data: DataSet) -> tuple[str, ...]:
    return data.labels or tuple(map(str, range(data.classes)))


def _classes(data: DataSet) -> str:
    names = _names(data)
    return f"{data.classes} classes ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
