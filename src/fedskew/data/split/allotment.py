"""What the dealers share: a pool, cuts by shares, tables of clients x classes, bounded redraws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedskew.core.settings import UsageError

T = TypeVar("T")
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Rng = np.random.RandomState
Count = Annotated[int, Meta(ge=1)]
Spread = Annotated[float, Meta(ge=0, le=100)]


@dataclass(frozen=True, eq=False)
class Pool:
    """What there is to deal: labels 0..C-1, every class with a sample; who made each sample, if that is known."""

    y: IntArray
    owners: npt.NDArray[Any] | None = None

    @cached_property
    def members(self) -> list[IntArray]:
        return by_value(self.y)

    @cached_property
    def counts(self) -> IntArray:
        return np.bincount(self.y).astype(np.int64)


class Assigned(NamedTuple):
    """One array of positions in the pool per client, and what the dealer wants to say."""

    clients: list[IntArray]
    notes: tuple[str, ...] = ()


def by_value(y: IntArray) -> list[IntArray]:
    """The positions of 0, of 1, of 2, ... in y, each ascending."""
    return in_sizes(np.argsort(y, kind="stable"), np.bincount(y))


def in_sizes(order: IntArray, sizes: npt.NDArray[Any]) -> list[IntArray]:
    return np.split(order, np.cumsum(sizes)[:-1])


def even(n: int, parts: int) -> IntArray:
    """n in parts that differ by at most one, the larger first."""
    return n // parts + (np.arange(parts) < n % parts).astype(np.int64)


def slices(p: FloatArray, n: int | IntArray) -> IntArray:
    """Sizes of the pieces of n cut at floor(cumsum(p) n), along the last axis; the last piece takes the remainder."""
    cuts = (np.cumsum(p, axis=-1) * n).astype(np.int64)
    cuts[..., -1:] = n
    return np.diff(cuts, axis=-1, prepend=0)


def among_open(p: FloatArray, is_open: BoolArray, rng: Rng) -> FloatArray:
    """The shares p of those that are open, renormalised; where nothing is left, one open place takes all.

    A small alpha makes every share underflow (0/0 inside the generator); Dir(alpha -> 0) is a single place.
    """
    p = np.nan_to_num(p) * is_open
    total: FloatArray = p.sum(axis=-1, keepdims=True)
    if (total > 0).all():
        return np.divide(p, total)
    place = np.argmax((1 - rng.random_sample(p.shape)) * is_open, axis=-1)
    single = np.arange(p.shape[-1]) == place[..., None]
    return np.where(total > 0, p / np.where(total > 0, total, 1), single)


def capped_table(shares: Iterable[FloatArray], counts: Sequence[int] | IntArray, cap: float, rng: Rng) -> IntArray:
    """Class after class cut by its shares; who holds `cap` samples gets no more.  # [..., clients, classes]"""
    columns: list[IntArray] = []
    sizes = np.zeros(1, np.int64)
    for p, count in zip(shares, counts, strict=True):
        columns.append(slices(among_open(p, sizes < cap, rng), count))
        sizes = sizes + columns[-1]
    return np.stack(columns, axis=-1)


def hand_out(members: Sequence[IntArray], table: IntArray) -> list[IntArray]:
    """Each client its count of every class, taken in the order of `members`, class after class."""
    owner = np.concatenate([np.repeat(np.arange(len(table)), column) for column in table.T])
    return in_sizes(np.concatenate(members)[np.argsort(owner, kind="stable")], table.sum(axis=1))


def shuffled(members: Iterable[IntArray], rng: Rng) -> list[IntArray]:
    return [rng.permutation(indices) for indices in members]


def redraw(draw: Callable[[], T], least: Callable[[T], int], wanted: int, tries: int, failed: str) -> tuple[T, int]:
    """The first draw whose `least` is wanted or more, and how many were thrown away; `failed` says why none was."""
    best = 0
    for thrown in range(tries):
        drawn = draw()
        if least(drawn) >= wanted:
            return drawn, thrown
        best = max(best, least(drawn))
    raise UsageError(failed.format(tries=tries, best=best))


def redraws(count: int) -> tuple[str, ...]:
    return (f"{count} redraws",) if count else ()


def check_minimum(dealer: str, minimum: int, n: int, clients: int, instead: str) -> str:
    """Raises if no draw can reach the minimum; else the sentence for when no draw did."""
    if minimum * clients > n:
        raise UsageError(
            f"{dealer}: min={minimum} cannot be reached: {n} samples over {clients} clients allow at most "
            f"{n // clients}; use a smaller min or fewer clients."
        )
    return (
        f"{dealer}: min={minimum} was not reached in {{tries}} draws, the largest minimum among them was {{best}}; "
        f"use a larger alpha, fewer clients, a smaller min, or {instead}."
    )


def lognormal_sizes(n: int, clients: int, sigma: float, rng: Rng) -> IntArray:
    """Sizes in proportion to lognormal(., sigma), after one sample for everyone: no client can be empty."""
    if sigma == 0:
        return even(n, clients)
    z = sigma * rng.standard_normal(clients)
    weights = np.exp(z - z.max())
    return 1 + slices(weights / weights.sum(), n - clients)


def granted(asked: IntArray, stock: int, rng: Rng) -> IntArray:
    """What each client gets of a class: all it asked for, or if the stock is too small a random part."""
    if asked.sum() <= stock:
        return asked
    requests = rng.permutation(np.repeat(np.arange(len(asked)), asked))
    return np.bincount(requests[:stock], minlength=len(asked))


def drawn_labels(first: BoolArray, k: int, rng: Rng) -> BoolArray:
    """Every client's labels in `first`, filled up to k with random others.  # [clients, classes]"""
    keys = np.where(first, -1.0, rng.random_sample(first.shape))
    owned = np.zeros_like(first)
    np.put_along_axis(owned, np.argsort(keys, axis=1)[:, :k], True, axis=1)
    return owned


def owners_table(owned: BoolArray, counts: IntArray) -> IntArray:
    """Each class in equal parts (+-1) over the clients that own it."""
    owners = owned.sum(axis=0)
    rank = np.cumsum(owned, axis=0)
    return np.where(owned, counts // owners + (rank <= counts % owners), 0)


def assign_owned(owned: BoolArray, pool: Pool, rng: Rng) -> Assigned:
    short = int((pool.counts < owned.sum(axis=0)).sum())
    notes = (f"{short} classes have fewer samples than clients that should hold them",) if short else ()
    return Assigned(hand_out(shuffled(pool.members, rng), owners_table(owned, pool.counts)), notes)


def check_labels(dealer: str, clients: int, key: str, k: int, classes: int) -> None:
    if k > classes:
        raise UsageError(f"{dealer}: {key}={k} but there are only {classes} classes.")
    if clients * k < classes:
        raise UsageError(
            f"{dealer}: {clients} clients with {key}={k} cannot hold all {classes} classes; "
            f"use {key}={-(-classes // clients)} or clients={-(-classes // k)} or more."
        )


def shards_table(labels: IntArray, counts: IntArray) -> IntArray:
    """Label-pure shards: `labels` [clients, each] has every label equally often, and each is one part of its class."""
    flat = labels.ravel()
    per_class = flat.size // len(counts)
    size = np.empty_like(flat)
    size[np.argsort(flat, kind="stable")] = np.concatenate([even(int(n), per_class) for n in counts])
    table = np.zeros((len(labels), len(counts)), np.int64)
    np.add.at(table, (np.repeat(np.arange(len(labels)), labels.shape[1]), flat), size)
    return table
