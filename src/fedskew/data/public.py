"""A public set D0 of the user's own on the server, instead of one that the split takes from the training pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet
from fedskew.data.split.partition import Partition
from fedskew.data.table import recoded


def with_public(data: DataSet, partition: Partition, public: DataSet) -> tuple[DataSet, Partition]:
    """Append all samples of `public` (its training and test parts) to the training pool, as the partition's public set.

    The clients' indices stay valid. Raises `UsageError` if the partition has a public set already, or if samples or
    classes of `public` are not those of `data`.
    """
    if len(partition.public):
        raise UsageError(
            f"the server has two public sets, {public.name} and the {len(partition.public)} samples that the split "
            "takes from the pool: expected one; leave out public= or the split's public:..."
        )
    server = replace(public, owners_train=None).pooled()
    if data.columns and server.columns:
        x = recoded(server.x_train, server.columns, data.columns, [range(len(c.categories)) for c in data.columns])
        server = replace(server, x_train=x, columns=data.columns)
    if (server.x_train.dtype, server.shape) != (data.x_train.dtype, data.shape):
        raise UsageError(
            f"the public set {server.name} has {_samples(server)}: expected {_samples(data)} ({data.name})."
        )
    if server.classes != data.classes or (server.labels and server.labels != _names(data)):
        raise UsageError(
            f"the public set {server.name} has {_classes(server)}: expected {_classes(data)} ({data.name})."
        )
    x, y = np.concatenate([data.x_train, server.x_train]), np.concatenate([data.y_train, server.y_train])
    return replace(data, x_train=x, y_train=y), replace(partition, public=np.arange(len(data.y_train), len(y)))


def _samples(data: DataSet) -> str:
    kind = "images" if data.x_train.dtype == np.uint8 else "vectors"
    return f"{kind} of shape {'x'.join(map(str, data.shape))}"


def _names(data: DataSet) -> tuple[str, ...]:
    return data.labels or tuple(map(str, range(data.classes)))


def _classes(data: DataSet) -> str:
    names = _names(data)
    return f"{data.classes} classes ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
