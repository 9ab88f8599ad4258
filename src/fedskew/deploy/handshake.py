"""Sites that bring their own data: the task they agree on, and the `World` of each site and of the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, DataSet, number_of
from fedskew.data.split.partition import Partition, Parts
from fedskew.data.table import agree_on, prepared, sums_of
from fedskew.deploy.messages import SiteFacts, Task
from fedskew.experiment.assemble import world_of
from fedskew.experiment.config import Experiment
from fedskew.federation.world import World

NO_SAMPLES = np.empty(0, np.int64)


class Misfit(UsageError):
    """The samples of one site differ from the others'. `site` is its name."""

    def __init__(self, site: str, text: str) -> None:
        super().__init__(text)
        self.site = site


def labels_of(data: DataSet) -> tuple[str, ...]:
    """The names of the classes; their numbers if they have no names."""
    return data.labels or tuple(map(str, range(data.classes)))


def facts_of(data: DataSet) -> SiteFacts:
    """What a site reports about its data, with sums over pixels or columns, which give the means over all sites."""
    if data.columns:
        sums = sums_of(data.x_train, data.columns)
        return SiteFacts((len(sums),), "table", labels_of(data), len(data.y_train), columns=sums)
    kind: Any = str(data.x_train.dtype)
    facts = SiteFacts(data.x_train.shape[1:], kind, labels_of(data), len(data.y_train))
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
    """The common task of all sites (site name -> facts); Misfit names a site whose samples differ from the others'.

    The classes are the union of the sites' classes, in numerical order if all names are numbers.
    """
    forms = {name: (fact.kind, fact.shape) for name, fact in facts.items()}
    common = _usual(forms)
    for name, form in sorted(forms.items()):
        if form != common:
            text = f"site {name} has samples of {form[0]}{list(form[1])}, the others of {common[0]}{list(common[1])}."
            raise Misfit(name, text)
    _check_columns(facts)
    labels = sorted({label for fact in facts.values() for label in fact.labels})
    if all(number_of(label) is not None for label in labels):
        labels.sort(key=float)
    if len(labels) < 2:
        raise UsageError(f"the samples of all sites are of one class, {labels[0]}; at least two are needed.")
    if common[0] == "table":
        table = agree_on({f"site {name}": facts[name].columns for name in sorted(facts)})
        return Task((len(table.features),), "float32", tuple(labels), (), (), table)
    mean, std = _moments([facts[name] for name in sorted(facts)]) if common[0] == "uint8" else ((), ())
    return Task(common[1], common[0], tuple(labels), mean, std)


def agree_without_misfits(facts: dict[str, SiteFacts], refuse: Callable[[str], None]) -> Task | None:
    """The common task of the sites that fit together; None if there are none.

    A site whose samples differ from most is removed from `facts`, and `refuse` is told why.
    """
    while facts:
        try:
            return agree(facts)
        except Misfit as misfit:
            refuse(f"{misfit} It is left out.")
            del facts[misfit.site]
    return None


def _usual(values: Mapping[str, Any]) -> Any:
    """The most frequent of the sites' values."""
    return max(values.values(), key=list(values.values()).count)


def _check_columns(facts: Mapping[str, SiteFacts]) -> None:
    """Raise Misfit for a site whose table has other columns than most, or words where most have numbers."""
    names = {site: sorted(column.name for column in fact.columns) for site, fact in facts.items()}
    for site in sorted(names):
        if odd := sorted(set(names[site]) ^ set(_usual(names))):
            raise Misfit(site, f"site {site} and most others have different columns: '{odd[0]}' is in one only.")
    for name in _usual(names):
        kinds = {
            site: "categories" if column.counts else "numbers"
            for site, fact in facts.items()
            for column in fact.columns
            if column.name == name and column.present
        }
        for site, kind in sorted(kinds.items()):
            if kind != _usual(kinds):
                raise Misfit(site, f"column '{name}' has {kind} at site {site}, but {_usual(kinds)} at most others.")


def describe_filling(task: Task, facts: Mapping[str, SiteFacts]) -> str:
    """One line about the missing values that sites fill in tables; "" if there are none."""
    if task.table is None:
        return ""
    missing: dict[str, int] = {}
    for sums in (one for fact in facts.values() for one in fact.columns):
        missing[sums.name] = missing.get(sums.name, 0) + sums.rows - sums.present
    return task.table.describe(missing)


def _moments(facts: Sequence[SiteFacts]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 over the pixels of all sites, by channel. The sums are exact integers."""
    pixels, channels = sum(fact.pixels for fact in facts), range(facts[0].shape[2])
    sums = [sum(fact.sums[c] for fact in facts) for c in channels]
    squares = [sum(fact.squares[c] for fact in facts) for c in channels]
    spread = [math.sqrt(pixels * square - total * total) for square, total in zip(squares, sums, strict=True)]
    return tuple(s / pixels / 255 for s in sums), tuple(s / pixels / 255 or 1.0 for s in spread)


def relabelled(data: DataSet, task: Task) -> DataSet:
    """The data with the class numbers and the normalisation of the task; UsageError if they do not fit it."""
    if task.table is not None and data.columns:
        data = prepared(data, task.table)
    if (str(data.x_train.dtype), data.x_train.shape[1:]) != (task.kind, task.shape):
        raise UsageError(
            f"{data.name} has samples of {data.x_train.dtype}{list(data.x_train.shape[1:])}, "
            f"but this run needs {task.kind}{list(task.shape)}."
        )
    number = {label: n for n, label in enumerate(task.labels)}
    if foreign := [label for label in labels_of(data) if label not in number]:
        raise UsageError(f"{data.name} has the class {foreign[0]!r}, which is not one of this run's classes.")
    numbers = np.array([number[label] for label in labels_of(data)], np.int64)
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
    """The world of one site: `client` has all its samples, the other clients have none.

    Its test samples are the test part of `data`.
    """
    pooled = relabelled(data, task).pooled()
    train, test = np.split(np.arange(len(pooled.y_train)), [len(data.y_train)])
    nothing = Parts(NO_SAMPLES, NO_SAMPLES, NO_SAMPLES)
    parts = [Parts(train, NO_SAMPLES, test) if c == client else nothing for c in range(sites)]
    return _world(experiment, pooled, parts, NO_SAMPLES, device)


def server_world(experiment: Experiment, task: Task, data: DataSet | None, sites: int, device: str) -> World:
    """The world of the server: no client has samples. `data` are its test set and public data; None: it has none."""
    if data is None:
        empty: Array = np.empty((0, *task.shape), task.kind)
        data = DataSet("sites", empty, NO_SAMPLES, empty, NO_SAMPLES, len(task.labels), labels=task.labels)
        data = replace(data, mean=task.mean, std=task.std)
    else:
        data = relabelled(data, task)
    if experiment.method.public and not len(data.y_train):
        raise UsageError(
            f"method {experiment.method_name} needs public data on the server: give a path with --server-data."
        )
    public = np.arange(len(data.y_train)) if experiment.method.public else NO_SAMPLES
    return _world(experiment, data, [Parts(NO_SAMPLES, NO_SAMPLES, NO_SAMPLES)] * sites, public, device)


def _world(experiment: Experiment, data: DataSet, parts: Sequence[Parts], public: Any, device: str) -> World:
    return world_of(experiment, data, Partition(tuple(part.train for part in parts), public), parts, device)
