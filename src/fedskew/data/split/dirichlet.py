"""Dealers that draw: how much of what a client gets is a draw from a distribution. See dealers.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedskew.data.split.allotment import (
    Assigned,
    Count,
    FloatArray,
    IntArray,
    Pool,
    Rng,
    Spread,
    among_open,
    by_value,
    capped_table,
    check_minimum,
    granted,
    hand_out,
    in_sizes,
    lognormal_sizes,
    redraw,
    redraws,
    shuffled,
    slices,
)

TRIES = 1000


@dataclass(frozen=True)
class WithAlpha:
    clients: Count = 10
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1e9:
            raise ValueError(f"alpha must be positive and at most 1e9, got {self.alpha:g}; for an even split use iid")


@dataclass(frozen=True)
class Dirichlet(WithAlpha):
    """Each class over the clients by Dirichlet(alpha); cap: a client with its even share gets no further class."""

    cap: bool = True
    min: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, C = len(pool.y), self.clients, len(pool.counts)
        failed = check_minimum("dirichlet", self.min, n, N, instead="dirichlet-mix or grouped-equal")
        cap = n / N if self.cap else math.inf

        def draw() -> tuple[list[IntArray], IntArray]:
            members = [indices.copy() for indices in pool.members]

            def shares() -> Iterable[FloatArray]:
                for indices in members:  # shuffle, then draw, class by class: the published code's use of the generator
                    rng.shuffle(indices)
                    yield rng.dirichlet(np.full(N, self.alpha))

            return members, capped_table(shares(), pool.counts, cap, rng)

        tries = max(100, min(TRIES, 200_000_000 // (n + C * (5 * N + 2500))))  # about two seconds
        partition, thrown = redraw(draw, lambda d: int(d[1].sum(axis=1).min()), self.min, tries, failed)
        return Assigned(hand_out(*partition), redraws(thrown))


@dataclass(frozen=True)
class DirichletMix(WithAlpha):
    """Each client a class mix from Dirichlet(alpha); prior: alpha times the class shares; sigma: lognormal sizes."""

    prior: bool = False
    sigma: Spread = 0.0

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, left = len(pool.y), self.clients, pool.counts.copy()
        scale = left / n if self.prior else np.ones(len(left))
        mixes = among_open(rng.dirichlet(self.alpha * scale, size=N), np.ones(1, bool), rng)
        need = lognormal_sizes(n, N, self.sigma, rng)
        table = np.zeros((N, len(left)), np.int64)
        while need.any():  # ends: who must ask again has found a class used up
            wanted = mixes * (left > 0)
            gone = wanted.sum(axis=1, keepdims=True) < 1e-9  # this mix wants only what is gone: take what is there
            p = np.where(gone, left, wanted)
            p /= p.sum(axis=1, keepdims=True)
            asked = np.stack([rng.multinomial(k, row) for k, row in zip(need, p, strict=True)])
            given = np.stack([granted(a, int(stock), rng) for a, stock in zip(asked.T, left, strict=True)], axis=1)
            table += given
            left -= given.sum(axis=0)
            need -= given.sum(axis=1)
        return Assigned(hand_out(shuffled(pool.members, rng), table))


@dataclass(frozen=True)
class GroupedEqual(WithAlpha):
    """Dirichlet inside groups of ten clients, then cut again into equal parts: all clients of one size."""

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N = len(pool.y), self.clients
        groups = -(-N // 10)
        borders = 10 * n // N * np.arange(1, groups)
        workers: list[IntArray] = []
        thrown = 0
        for g, group in enumerate(np.split(rng.permutation(n), borders)):
            members = by_value(pool.y[group])
            table, more = self._table([len(m) for m in members], min(10, N - 10 * g), rng)
            workers += hand_out([group[m] for m in members], table)
            thrown += more
        return Assigned(np.array_split(np.concatenate(workers), N), redraws(thrown))

    def _table(self, counts: list[int], workers: int, rng: Rng) -> tuple[IntArray, int]:
        """The first table whose smallest worker has half the mean or more; drawn by the hundred, as few do."""
        mean, batch = sum(counts) / workers, 250
        half = int(mean / 2)

        def draw() -> IntArray:
            p = rng.dirichlet(np.full(workers, self.alpha), size=(batch, len(counts)))
            return capped_table(np.moveaxis(p, 1, 0), counts, mean, rng)

        def smallest(tables: IntArray) -> IntArray:
            least: IntArray = tables.sum(axis=-1).min(axis=-1)
            return least

        failed = (
            f"grouped-equal: no draw of {{tries}} x {batch} gave every client of a group {half} samples (half the "
            "mean), the best {best}; use a larger alpha, or dirichlet."
        )
        tables, thrown = redraw(draw, lambda t: int(smallest(t).max()), half, 80, failed)
        first = int(np.argmax(smallest(tables) >= half))
        return tables[first], thrown * batch + first


@dataclass(frozen=True)
class Quantity(WithAlpha):
    """Random parts with sizes by Dirichlet(alpha): the classes even, the amounts not."""

    min: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N = len(pool.y), self.clients
        failed = check_minimum("quantity", self.min, n, N, instead="lognormal")
        order = rng.permutation(n)

        def draw() -> IntArray:
            return slices(among_open(rng.dirichlet(np.full(N, self.alpha)), np.ones(1, bool), rng), n)

        sizes, thrown = redraw(draw, lambda s: int(s.min()), self.min, TRIES, failed)
        return Assigned(in_sizes(order, sizes), redraws(thrown))


@dataclass(frozen=True)
class Lognormal:
    """Random parts with lognormal sizes: the classes even, the amounts not."""

    clients: Count = 10
    sigma: Spread = 0.3

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        sizes = lognormal_sizes(len(pool.y), self.clients, self.sigma, rng)
        return Assigned(in_sizes(rng.permutation(len(pool.y)), sizes))
