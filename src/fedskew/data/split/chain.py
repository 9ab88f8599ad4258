"""Splits as text: how a training pool is partitioned over clients.

    public:per_class=100+longtail:factor=100+dirichlet:alpha=0.1,clients=20+noise:level=0.1

A split is a chain, joined by +: any number of *cuts* (which part of the pool is used), one *partitioner* (which client
gets which samples), any number of *features* (what makes the clients' inputs differ). The result depends on the text,
the labels and the seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import cleandoc
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.core.settings import UsageError, build, choose, parse
from fedskew.data.split.allotment import IntArray, Pool
from fedskew.data.split.cuts import CUTS, Cut
from fedskew.data.split.features import FEATURES, Feature
from fedskew.data.split.partition import Partition, checked_seed
from fedskew.data.split.partitioners import PARTITIONERS, Partitioner


def make_partition(
    text: str,
    y: npt.NDArray[Any],
    *,
    seed: int,
    classes: int | None = None,
    owners: npt.NDArray[Any] | None = None,
) -> Partition:
    """Partition the samples with labels `y` over clients.

    text: the split, such as "iid:clients=10" or "public:per_class=5+dirichlet:alpha=0.1,clients=20".
    y: integer labels. Only their order matters: 3, 7, 9 are partitioned like 0, 1, 2.
    classes: checks that labels are in 0..classes-1 and notes how many have no sample; None checks nothing.
    owners: who made each sample, which the split `natural` needs; None if unknown.

    >>> y = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    >>> partition = make_partition("public:per_class=1+iid:clients=3", y, seed=0)
    >>> [len(samples) for samples in partition.clients], sorted(y[partition.public].tolist())
    ([2, 2, 2], [0, 1, 2])
    """
    cuts, partitioner, features = _read(text)
    rng = np.random.RandomState(checked_seed(seed))
    labels = np.unique(y)
    if classes is not None and len(labels) and not 0 <= labels[0] <= labels[-1] < classes:
        raise UsageError(
            f"labels from {labels[0]} to {labels[-1]} are invalid for classes={classes}: expected 0 to {classes - 1}."
        )
    missing = 0 if classes is None else classes - len(labels)
    notes = (f"{missing} of {classes} classes have no samples",) if missing else ()

    rest, public = np.arange(len(y)), np.empty(0, np.int64)
    for cut in cuts:
        left, taken = cut(_dense(y[rest]), rng)
        rest, public = rest[left], np.concatenate([public, rest[taken]])
    if (partitioner.clients or 1) > len(rest):
        raise UsageError(
            f"split '{text}': clients={partitioner.clients or 1} is invalid: expected at most {len(rest)}, the number "
            "of samples to partition."
        )

    assigned = partitioner(Pool(_dense(y[rest]), None if owners is None else owners[rest]), rng)
    empty = [i for i, positions in enumerate(assigned.clients) if not len(positions)]
    if empty:
        raise UsageError(
            f"split '{text}' leaves {len(empty)} of {len(assigned.clients)} clients without a sample "
            f"(first: {empty[0]}): expected fewer clients or more samples of each class."
        )
    for positions in assigned.clients:
        rng.shuffle(positions)
    clients = tuple(rest[positions] for positions in assigned.clients)
    partition = Partition(clients, np.sort(public), notes=notes + assigned.notes)
    for feature in features:
        partition = feature(partition)
    return partition


def _read(text: str) -> tuple[list[Cut], Partitioner, list[Feature]]:
    known: dict[str, object] = {**CUTS, **PARTITIONERS, **FEATURES}
    steps = parse(text, "split")
    names = [name for name, _ in steps]
    for name in names:
        choose("split", name, known)
        if names.count(name) > 1:
            raise UsageError(f"split '{text}' is invalid: expected {name} once, got it twice.")
    order = [0 if name in CUTS else 1 if name in PARTITIONERS else 2 for name in names]
    if order.count(1) != 1 or order != sorted(order):
        raise UsageError(
            f"split '{text}' is invalid: expected cuts ({', '.join(CUTS)}), then one partitioner "
            f"({', '.join(PARTITIONERS)}), then features ({', '.join(FEATURES)}), joined by +."
        )

    def built(registry: Mapping[str, type[Any]]) -> list[Any]:
        return [build(registry[name], options, f"split '{name}'") for name, options in steps if name in registry]

    return built(CUTS), built(PARTITIONERS)[0], built(FEATURES)


def _dense(y: npt.NDArray[Any]) -> IntArray:
    """Labels as 0..C-1 in their order, over those that occur."""
    return np.unique(y, return_inverse=True)[1].reshape(-1).astype(np.int64)


def listing() -> dict[str, dict[str, str]]:
    """What a split can be made of: under "cut", "partitioner" and "feature", each name and what it does.

    >>> listing()["cut"]["sample"]
    'A random part of the pool: keep samples, or below 1 that fraction. (keep=0.1)'
    """
    kinds: dict[str, Mapping[str, type[Any]]] = {"cut": CUTS, "partitioner": PARTITIONERS, "feature": FEATURES}
    return {word: {name: _described(kind) for name, kind in registry.items()} for word, registry in kinds.items()}


def _described(kind: type[Any]) -> str:
    """The first paragraph of the docstring, and the settings with their defaults."""

    def setting(name: str, default: object) -> str:
        return name if default is None or default is MISSING else f"{name}={str(default).lower()}"

    about = cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return f"{about} ({', '.join(setting(f.name, f.default) for f in fields(kind))})"
