"""Splits: how a training pool is partition to clients, as one text.

    public:per_class=100+longtail:factor=100+dirichlet:alpha=0.1,clients=20+noise:level=0.1

is a chain: any number of *cuts* (what part of the pool is used), one *dealer*, any number of *features*
(what makes clients' inputs differ). Everything follows from the text, the labels and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedskew.core.settings import UsageError, build, choose, parse
from fedskew.data.split.allotment import Count, IntArray, Pool, Rng, by_value
from fedskew.data.split.partitioners import PARTITIONERS, Partitioner

Amount = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Partition:
    """Who has which samples of the training pool."""

    clients: tuple[IntArray, ...]
    public: IntArray  # the balanced public set D0, on no client; often empty
    noise: tuple[float, ...] | None = None  # per client: standard deviation of input noise
    rotation: tuple[float, ...] | None = None  # per client: degrees
    notes: tuple[str, ...] = ()  # what the split wants to say


@dataclass(frozen=True)
class Parts:
    """One client's own samples, as indices into the training pool."""

    train: IntArray
    validation: IntArray
    test: IntArray


def amount(value: float, of: int, what: str) -> int:
    """A count, or below 1 a fraction of `of`; never all of it."""
    count = int(round(value * of, 6)) if value < 1 else value  # 0.29 * 100 is 28.999999999999996
    if not 0 < count < of or count != int(count):
        raise UsageError(
            f"{what}={value:g} will not do for {of}: give a fraction below 1, or a count from 1 to {of - 1}."
        )
    return int(count)


# --- cuts: (labels, generator) -> the positions kept for the clients, the positions of the public set


class Cut(Protocol):
    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]: ...


def first_of_each(y: IntArray, counts: list[int], rng: Rng) -> IntArray:
    """Positions of that many random samples of each class, ascending."""
    return np.sort(np.concatenate([rng.permutation(m)[:k] for m, k in zip(by_value(y), counts, strict=True)]))


def without_public(y: IntArray, per_class: float, what: str, rng: Rng) -> tuple[IntArray, IntArray]:
    counts = np.bincount(y)
    each = amount(per_class, int(counts.min()), what)
    public = first_of_each(y, [each] * len(counts), rng)
    return np.setdiff1d(np.arange(len(y)), public), public


def tail_counts(head: int, classes: int, factor: float) -> list[int]:
    """n_c = head * factor^(-c/(C-1)), truncated in this order of operations (the published counts depend on it)."""
    return [int(head * (1 / factor) ** (c / max(classes - 1, 1))) for c in range(classes)]


@dataclass(frozen=True)
class Public:
    """A balanced public set D0 on no client: per_class samples, or below 1 that fraction of the smallest class."""

    per_class: Amount = 100

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        return without_public(y, self.per_class, "public: per_class", rng)


@dataclass(frozen=True)
class Longtail:
    """Classes thinned exponentially, the last to 1/factor of the first; public: D0 is cut before, as `public` does."""

    factor: Annotated[float, Meta(ge=1)] = 100.0
    public: Amount = 0.0

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        kept, public = np.arange(len(y)), np.empty(0, np.int64)
        if self.public:
            kept, public = without_public(y, self.public, "longtail: public", rng)
        left = np.bincount(y[kept])
        counts = tail_counts(int(left.min()), len(left), self.factor)
        if min(counts) == 0:
            raise UsageError(f"longtail: factor={self.factor:g} leaves a class empty; at most {left.min()} would do.")
        return kept[first_of_each(y[kept], counts, rng)], public


@dataclass(frozen=True)
class Sample:
    """A random part of the pool: keep samples, or below 1 that fraction."""

    keep: Amount = 0.1

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        chosen = rng.permutation(len(y))[: amount(self.keep, len(y), "sample: keep")]
        return np.sort(chosen), np.empty(0, np.int64)


# --- features: what makes the clients' inputs differ


class Feature(Protocol):
    def __call__(self, partition: Partition) -> Partition: ...


@dataclass(frozen=True)
class Noise:
    """Client i of N adds Gaussian noise of standard deviation level * i/(N-1) to its inputs."""

    level: Annotated[float, Meta(ge=0, le=1000)] = 0.1

    def __call__(self, partition: Partition) -> Partition:
        last = max(len(partition.clients) - 1, 1)
        return replace(partition, noise=tuple(self.level * i / last for i in range(len(partition.clients))))


@dataclass(frozen=True)
class Rotate:
    """Client i turns its inputs by (i mod turns) * 360/turns degrees."""

    turns: Count = 4

    def __call__(self, partition: Partition) -> Partition:
        return replace(
            partition,
            rotation=tuple(i % self.turns * 360 / self.turns for i in range(len(partition.clients))),
        )


CUTS: dict[str, type[Cut]] = {"public": Public, "longtail": Longtail, "sample": Sample}
FEATURES: dict[str, type[Feature]] = {"noise": Noise, "rotate": Rotate}


# --- the chain


def _read(text: str) -> tuple[list[Cut], Partitioner, list[Feature]]:
    known: dict[str, object] = {**CUTS, **PARTITIONERS, **FEATURES}
    steps = parse(text, "split")
    names = [name for name, _ in steps]
    for name in names:
        choose("split", name, known)
        if names.count(name) > 1:
            raise UsageError(f"split '{text}' has {name} twice.")
    order = [0 if name in CUTS else 1 if name in PARTITIONERS else 2 for name in names]
    if order.count(1) != 1 or order != sorted(order):
        raise UsageError(
            f"split '{text}' will not do: write cuts ({', '.join(CUTS)}), then one dealer ({', '.join(PARTITIONERS)}), "
            f"then features ({', '.join(FEATURES)}), joined by +."
        )

    def built(registry: Mapping[str, type[Any]]) -> list[Any]:
        return [build(registry[name], options, f"split '{name}'") for name, options in steps if name in registry]

    return built(CUTS), built(PARTITIONERS)[0], built(FEATURES)


def _checked(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed must be from 0 to {2**32 - 1}, got {seed}.")
    return seed


def make_partition(
    text: str,
    y: npt.NDArray[Any],
    *,
    seed: int,
    classes: int | None = None,
    owners: npt.NDArray[Any] | None = None,
) -> Partition:
    """The split `text` of samples with labels `y`. `classes` checks the labels: what has no sample is not partition."""
    before, dealer, after = _read(text)
    rng = np.random.RandomState(_checked(seed))
    labels = np.unique(y)
    if classes is not None and len(labels) and not 0 <= labels[0] <= labels[-1] < classes:
        raise UsageError(f"labels from {labels[0]} to {labels[-1]} do not fit classes={classes}.")
    missing = 0 if classes is None else classes - len(labels)
    notes = (f"{missing} of {classes} classes have no samples",) if missing else ()

    kept, public = np.arange(len(y)), np.empty(0, np.int64)
    for cut in before:
        stay, taken = cut(_dense(y[kept]), rng)
        kept, public = kept[stay], np.concatenate([public, kept[taken]])
    if (dealer.clients or 1) > len(kept):
        raise UsageError(
            f"split '{text}': clients={dealer.clients or 1} but there are only {len(kept)} samples to deal."
        )

    partition = dealer(Pool(_dense(y[kept]), None if owners is None else owners[kept]), rng)
    empty = [i for i, mine in enumerate(partition.clients) if not len(mine)]
    if empty:
        raise UsageError(
            f"split '{text}' leaves {len(empty)} of {len(partition.clients)} clients without a sample "
            f"(first: {empty[0]}); use fewer clients or more samples per class."
        )
    for mine in partition.clients:
        rng.shuffle(mine)
    result = Partition(tuple(kept[mine] for mine in partition.clients), np.sort(public), notes=notes + partition.notes)
    for feature in after:
        result = feature(result)
    return result


def _dense(y: npt.NDArray[Any]) -> IntArray:
    """Labels as 0..C-1 in their order, over those that occur."""
    return np.unique(y, return_inverse=True)[1].reshape(-1).astype(np.int64)


def portion(partition: Partition, *, validation: float = 0.0, test: float = 0.0, seed: int) -> tuple[Parts, ...]:
    """Each client's samples, permuted and cut: train first. Of client i it depends on (seed, i) alone."""
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise UsageError(f"validation={validation:g} and test={test:g} must be 0 or more and sum to less than 1.")
    parts = []
    for i, mine in enumerate(partition.clients):
        n = len(mine)
        tests = n - round((1 - test) * n)
        trains = max(min(n, 1), n - tests - (n - round((1 - validation) * n)))  # a client can always train
        tests = min(tests, n - trains)
        order = np.random.default_rng((_checked(seed), i)).permutation(mine)
        parts.append(Parts(*np.split(order, [trains, n - tests])))
    return tuple(parts)


def newcomers(population: int, share: float, seed: int) -> tuple[int, ...]:
    """Clients that never train, sorted: a count, or below 1 a fraction of the population."""
    if share == 0:
        return ()
    chosen = np.random.default_rng(_checked(seed)).permutation(population)[: amount(share, population, "newcomers")]
    return tuple(sorted(chosen.tolist()))


# --- for the list of splits


def partitioners() -> dict[str, str]:
    """Name -> what it does, with its settings and their defaults."""
    return _described(PARTITIONERS)


def cuts() -> dict[str, str]:
    return _described(CUTS)


def features() -> dict[str, str]:
    return _described(FEATURES)


def _described(registry: Mapping[str, type[Any]]) -> dict[str, str]:
    def setting(name: str, default: object) -> str:
        return name if default is None or default is MISSING else f"{name}={str(default).lower()}"

    return {
        name: f"{kind.__doc__} ({', '.join(setting(f.name, f.default) for f in fields(kind))})"
        for name, kind in registry.items()
    }
