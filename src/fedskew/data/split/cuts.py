"""Cuts: which part of the pool the clients share, and which samples go to the server's public set.

A cut is a frozen dataclass; its fields are its settings. Called with labels and a generator, it returns the positions
left for the clients and the positions of the public set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta

from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import IntArray, Rng, positions_by_label
from fedskew.data.split.partition import count_or_fraction

Amount = Annotated[float, Meta(ge=0)]


class Cut(Protocol):
    """(labels, generator) -> (positions left for the clients, positions of the public set)."""

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]: ...


def sample_per_class(y: IntArray, counts: list[int], rng: Rng) -> IntArray:
    """The positions of counts[c] random samples of each class c, ascending."""
    positions = positions_by_label(y)
    return np.sort(np.concatenate([rng.permutation(p)[:count] for p, count in zip(positions, counts, strict=True)]))


def take_public(y: IntArray, per_class: float, setting: str, rng: Rng) -> tuple[IntArray, IntArray]:
    """A public set of per_class samples of every class (below 1: that fraction of the smallest): (rest, public)."""
    counts = np.bincount(y)
    each = count_or_fraction(per_class, int(counts.min()), setting)
    public = sample_per_class(y, [each] * len(counts), rng)
    return np.setdiff1d(np.arange(len(y)), public), public


def longtail_counts(head: int, classes: int, factor: float) -> list[int]:
    """n_c = head * factor^(-c/(C-1)), rounded down.

    The published counts depend on this order of operations: another loses one where a value is just under an integer.
    """
    return [int(head * (1 / factor) ** (c / max(classes - 1, 1))) for c in range(classes)]


@dataclass(frozen=True)
class Public:
    """A balanced public set D0 on no client: per_class samples, or below 1 that fraction of the smallest class."""

    per_class: Amount = 100

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        return take_public(y, self.per_class, "public: per_class", rng)


@dataclass(frozen=True)
class Longtail:
    """Classes thinned exponentially, the last to 1/factor of the first; public: D0 is cut first, as `public` does.

    factor: samples of the first class over those of the last; 1 makes all classes as large as the smallest.
    public: samples of each class in D0, or below 1 a fraction of the smallest class; 0 is no public set.
    """

    factor: Annotated[float, Meta(ge=1)] = 100.0
    public: Amount = 0.0

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        rest, public = np.arange(len(y)), np.empty(0, np.int64)
        if self.public:
            rest, public = take_public(y, self.public, "longtail: public", rng)
        left = np.bincount(y[rest])
        counts = longtail_counts(int(left.min()), len(left), self.factor)
        if min(counts) == 0:
            raise UsageError(
                f"longtail: factor={self.factor:g} is invalid: it leaves a class empty; expected at most {left.min()}."
            )
        return rest[sample_per_class(y[rest], counts, rng)], public


@dataclass(frozen=True)
class Sample:
    """A random part of the pool: keep samples, or below 1 that fraction."""

    keep: Amount = 0.1

    def __call__(self, y: IntArray, rng: Rng) -> tuple[IntArray, IntArray]:
        count = count_or_fraction(self.keep, len(y), "sample: keep")
        return np.sort(rng.permutation(len(y))[:count]), np.empty(0, np.int64)


CUTS: dict[str, type[Cut]] = {"public": Public, "longtail": Longtail, "sample": Sample}
