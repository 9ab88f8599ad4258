"""What the partitioners share: the pool of samples, tables of clients x classes, bounded redraws, checks."""

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
Sigma = Annotated[float, Meta(ge=0, le=100)]


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples to partition.

    y: labels 0..C-1, every class with at least one sample.
    owners: who made each sample (any values that can be compared); None if that is unknown.
    """

    y: IntArray
    owners: npt.NDArray[Any] | None = None

    @cached_property
    def members(self) -> list[IntArray]:
        """The positions of each class's samples, ascending."""
        return positions_by_label(self.y)

    @cached_property
    def counts(self) -> IntArray:
        """The number of samples of each class."""
        return np.bincount(self.y).astype(np.int64)


class Assigned(NamedTuple):
    """A partitioner's result: each client's positions in the pool, and notes for the user."""

    clients: list[IntArray]
    notes: tuple[str, ...] = ()


# --- sizes and positions


def positions_by_label(y: IntArray) -> list[IntArray]:
    """The positions of label 0, of label 1, ... in y, each ascending."""
    return split_by_sizes(np.argsort(y, kind="stable"), np.bincount(y))


def split_by_sizes(order: IntArray, sizes: npt.NDArray[Any]) -> list[IntArray]:
    """Consecutive pieces of `order` with the given sizes, which sum to its length."""
    return np.split(order, np.cumsum(sizes)[:-1])


def even_sizes(n: int, parts: int) -> IntArray:
    """n as a sum of `parts` sizes that differ by at most one, the larger first."""
    return n // parts + (np.arange(parts) < n % parts).astype(np.int64)


def sizes_from_shares(shares: FloatArray, n: int | IntArray) -> IntArray:
    """Sizes of the pieces of n cut at floor(cumsum(shares) n), along the last axis; the last takes the remainder."""
    borders = (np.cumsum(shares, axis=-1) * n).astype(np.int64)
    borders[..., -1:] = n
    return np.diff(borders, axis=-1, prepend=0)


def lognormal_sizes(n: int, clients: int, sigma: float, rng: Rng) -> IntArray:
    """Sizes in proportion to lognormal(0, sigma) draws, after one sample for every client: none can be empty."""
    if sigma == 0:
        return even_sizes(n, clients)
    z = sigma * rng.standard_normal(clients)
    weights = np.exp(z - z.max())
    return 1 + sizes_from_shares(weights / weights.sum(), n - clients)


def shuffled(members: Iterable[IntArray], rng: Rng) -> list[IntArray]:
    """A shuffled copy of each array."""
    return [rng.permutation(indices) for indices in members]


# --- tables of clients x classes


def assign_by_table(members: Sequence[IntArray], table: IntArray) -> list[IntArray]:
    """Each client's positions: table[client, c] samples of class c, taken in the order of `members[c]`."""
    client = np.concatenate([np.repeat(np.arange(len(table)), column) for column in table.T])
    return split_by_sizes(np.concatenate(members)[np.argsort(client, kind="stable")], table.sum(axis=1))


def renormalised(shares: FloatArray, is_open: BoolArray, rng: Rng) -> FloatArray:
    """The shares of the open places, summing to one; where all of them are 0, one random open place takes all.

    A small alpha makes every share underflow (0/0 inside the generator); Dir(alpha -> 0) is a single place.
    """
    shares = np.nan_to_num(shares) * is_open
    total: FloatArray = shares.sum(axis=-1, keepdims=True)
    if (total > 0).all():
        return np.divide(shares, total)
    place = np.argmax((1 - rng.random_sample(shares.shape)) * is_open, axis=-1)
    single = np.arange(shares.shape[-1]) == place[..., None]
    return np.where(total > 0, shares / np.where(total > 0, total, 1), single)


def capped_table(shares: Iterable[FloatArray], counts: Sequence[int] | IntArray, cap: float, rng: Rng) -> IntArray:
    """Class after class cut by its shares; a client with `cap` samples gets no more.  # [..., clients, classes]"""
    columns: list[IntArray] = []
    sizes = np.zeros(1, np.int64)
    for p, count in zip(shares, counts, strict=True):
        columns.append(sizes_from_shares(renormalised(p, sizes < cap, rng), count))
        sizes = sizes + columns[-1]
    return np.stack(columns, axis=-1)


def fill_requests(requested: IntArray, stock: int, rng: Rng) -> IntArray:
    """How many samples of one class each client gets: what it requested, or a random part if the stock is too small."""
    if requested.sum() <= stock:
        return requested
    requests = rng.permutation(np.repeat(np.arange(len(requested)), requested))
    return np.bincount(requests[:stock], minlength=len(requested))


def draw_labels(required: BoolArray, k: int, rng: Rng) -> BoolArray:
    """k labels for each client: those in `required`, then random others.  # [clients, classes]"""
    keys = np.where(required, -1.0, rng.random_sample(required.shape))
    holds = np.zeros_like(required)
    np.put_along_axis(holds, np.argsort(keys, axis=1)[:, :k], True, axis=1)
    return holds


def holders_table(holds: BoolArray, counts: IntArray) -> IntArray:
    """Each class in equal parts (+-1) over the clients that hold it.  # [clients, classes]"""
    holders = holds.sum(axis=0)
    rank = np.cumsum(holds, axis=0)
    return np.where(holds, counts // holders + (rank <= counts % holders), 0)


def assign_to_holders(holds: BoolArray, pool: Pool, rng: Rng) -> Assigned:
    """Each class in equal random parts to the clients that hold it. `holds` is [clients, classes]."""
    short = int((pool.counts < holds.sum(axis=0)).sum())
    notes = (f"{short} classes have fewer samples than clients that should hold them",) if short else ()
    return Assigned(assign_by_table(shuffled(pool.members, rng), holders_table(holds, pool.counts)), notes)


def shards_table(labels: IntArray, counts: IntArray) -> IntArray:
    """Shards of one label each. `labels` [clients, shards each] has every label equally often.  # [clients, classes]"""
    flat = labels.ravel()
    per_class = flat.size // len(counts)
    size = np.empty_like(flat)
    size[np.argsort(flat, kind="stable")] = np.concatenate([even_sizes(int(n), per_class) for n in counts])
    table = np.zeros((len(labels), len(counts)), np.int64)
    np.add.at(table, (np.repeat(np.arange(len(labels)), labels.shape[1]), flat), size)
    return table


# --- redraws and checks


def redraw(draw: Callable[[], T], smallest: Callable[[T], int], wanted: int, tries: int, failed: str) -> tuple[T, int]:
    """Draw until `smallest(draw)` is `wanted` or more: that draw, and how many were rejected before it.

    After `tries` draws raises `UsageError(failed)`, with {tries} and {best} (the best `smallest`) filled in.
    """
    best = 0
    for rejected in range(tries):
        drawn = draw()
        if smallest(drawn) >= wanted:
            return drawn, rejected
        best = max(best, smallest(drawn))
    raise UsageError(failed.format(tries=tries, best=best))


def redraw_note(rejected: int) -> tuple[str, ...]:
    """The note of a partition that took redraws; empty if it took none."""
    return (f"draws of the split rejected because a client had too few samples: {rejected}",) if rejected else ()


def check_minimum(partitioner: str, minimum: int, n: int, clients: int, instead: str) -> str:
    """Raises if no draw can give every client the minimum; else returns the `failed` text for `redraw`."""
    if minimum * clients > n:
        raise UsageError(
            f"{partitioner}: min={minimum} is invalid: {n} samples over {clients} clients allow at most "
            f"{n // clients}; expected a smaller min or fewer clients."
        )
    return (
        f"{partitioner}: min={minimum} was not reached in {{tries}} draws, the largest minimum of a draw was {{best}}; "
        f"use a larger alpha, fewer clients, a smaller min, or {instead}."
    )


def check_labels_per_client(partitioner: str, clients: int, key: str, k: int, classes: int) -> None:
    """Raises unless `clients` clients with k labels each can hold all classes. `key`: the setting that k came from."""
    if k > classes:
        raise UsageError(f"{partitioner}: {key}={k} is invalid: expected at most {classes}, the number of classes.")
    if clients * k < classes:
        raise UsageError(
            f"{partitioner}: {clients} clients with {key}={k} cannot hold all {classes} classes: expected "
            f"{key}={-(-classes // clients)} or clients={-(-classes // k)} or more."
        )
