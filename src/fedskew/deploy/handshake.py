"""Roster that bring their own data: what they must agree on, and the world each of them works in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, DataSet
from fedskew.data.split.partition import Partition, Parts
from fedskew.deploy.messages import SiteFacts, Task
from fedskew.experiment.assemble import world_of
from fedskew.experiment.config import Experiment
from fedskew.federation.world import World

NOBODY = np.empty(0, np.int64)


def labels_of(data: DataSet) -> tuple[str, ...]:
    return data.labels or tuple(map(str, range(data.classes)))


def facts_of(data: DataSet) -> SiteFacts:
    facts = SiteFacts(data.x_train.shape[1:], str(data.x_train.dtype), labels_of(data), len(data.y_train))
    if facts.kind != "uint8":
        return facts
    levels = np.arange(256)
    counts = [np.bincount(data.x_train[..., c].ravel(), minlength=256) for c in range(data.x_train.shape[3])]
    return SiteFacts(
        facts.shape,
        facts.kind,
        facts.labels,
        facts.samples,
        int(counts[0].sum()),
        tuple(int(n @ levels) for n in counts),
        tuple(int(n @ levels**2) for n in counts),
    )


def agree(facts: Mapping[str, SiteFacts]) -> Task:
    """The task of all sites together; a site whose samples are of another form than most others' is named."""
    forms = {name: (fact.kind, fact.shape) for name, fact in facts.items()}
    usual = max(forms.values(), key=lambda form: list(forms.values()).count(form))
    for name, form in sorted(forms.items()):
        if form != usual:
            raise UsageError(
                f"site {name} has samples of {form[0]}{list(form[1])}, the others of {usual[0]}{list(usual[1])}."
            )
    labels = sorted({label for fact in facts.values() for label in fact.labels})
    if all(_number(label) is not None for label in labels):
        labels.sort(key=float)
    if len(labels) < 2:
        raise UsageError(f"all sites' samples are of one class, {labels[0]}.")
    mean, std = _moments([facts[name] for name in sorted(facts)]) if usual[0] == "uint8" else ((), ())
    return Task(usual[1], usual[0], tuple(labels), mean, std)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _moments(facts: Sequence[SiteFacts]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 over all sites' pixels, by channel. The sums are whole numbers: exact."""
    pixels, channels = sum(fact.pixels for fact in facts), range(facts[0].shape[2])
    sums = [sum(fact.sums[c] for fact in facts) for c in channels]
    squares = [sum(fact.squares[c] for fact in facts) for c in channels]
    spread = [math.sqrt(pixels * square - total * total) for square, total in zip(squares, sums, strict=True)]
    return tuple(s / pixels / 255 for s in sums), tuple(s / pixels / 255 or 1.0 for s in spread)


def relabelled(data: DataSet, task: Task) -> DataSet:
    """The data with the task's numbers for its classes; UsageError if they do not fit the task."""
    if (str(data.x_train.dtype), data.x_train.shape[1:]) != (task.kind, task.shape):
        raise UsageError(
            f"{data.name} has samples of {data.x_train.dtype}{list(data.x_train.shape[1:])}, "
            f"the run's are of {task.kind}{list(task.shape)}."
        )
    place = {label: number for number, label in enumerate(task.labels)}
    if foreign := [label for label in labels_of(data) if label not in place]:
        raise UsageError(f"{data.name} has a class {foreign[0]!r}, which the run does not know.")
    numbers = np.array([place[label] for label in labels_of(data)], np.int64)
    return replace(
        data,
        y_train=numbers[data.y_train],
        y_test=numbers[data.y_test],
        classes=len(task.labels),
        labels=task.labels,
        mean=task.mean,
        std=task.std,
    )


def site_world(experiment: Experiment, task: Task, data: DataSet, client: int, sites: int, device: str) -> World:
    """A site's: all its samples in one pool, its own test part as it was given (else a fifth of each class)."""
    own = relabelled(data, task).pooled()
    train, test = np.split(np.arange(len(own.y_train)), [len(data.y_train)])
    parts = [Parts(train, NOBODY, test) if c == client else Parts(NOBODY, NOBODY, NOBODY) for c in range(sites)]
    return _world(experiment, own, parts, NOBODY, device)


def server_world(experiment: Experiment, task: Task, data: DataSet | None, sites: int, device: str) -> World:
    """The server's: no client's samples, but a test set and public data if it was given some."""
    if data is None:
        empty: Array = np.empty((0, *task.shape), task.kind)
        data = DataSet("sites", empty, NOBODY, empty, NOBODY, len(task.labels), labels=task.labels)
        data = replace(data, mean=task.mean, std=task.std)
    else:
        data = relabelled(data, task)
    if experiment.method.public and not len(data.y_train):
        raise UsageError(
            f"method {experiment.method_name} needs public data on the server: name them with --server-data."
        )
    public = np.arange(len(data.y_train)) if experiment.method.public else NOBODY
    return _world(experiment, data, [Parts(NOBODY, NOBODY, NOBODY)] * sites, public, device)


def _world(experiment: Experiment, data: DataSet, parts: Sequence[Parts], public: Any, device: str) -> World:
    return world_of(experiment, data, Partition(tuple(part.train for part in parts), public), parts, device)
