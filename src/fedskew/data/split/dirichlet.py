"""Partitioners that draw shares or sizes from a distribution: Dirichlet or lognormal. The others: partitioners.py."""

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
    Sigma,
    assign_by_table,
    capped_table,
    check_minimum,
    fill_requests,
    lognormal_sizes,
    positions_by_label,
    redraw,
    redraw_note,
    renormalised,
    shuffled,
    sizes_from_shares,
    split_by_sizes,
)

TRIES = 1000  # draws before a minimum that is not reached becomes an error


@dataclass(frozen=True)
class WithAlpha:
    """The settings of every Dirichlet partitioner.

    clients: how many.
    alpha: concentration of the Dirichlet distribution; towards 0 all goes to one, a large alpha is even.
    """

    clients: Count = 10
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1e9:
            raise ValueError(
                f"alpha={self.alpha:g} is invalid: expected above 0 and at most 1e9; for an even split use iid"
            )


@dataclass(frozen=True)
class Dirichlet(WithAlpha):
    """Each class over the clients by Dirichlet(alpha); cap: a client with its even share gets no further class.

    cap: close a client to further classes once it has samples / clients.
    min: samples that every client must have; the partition is drawn again until it has.
    """

    cap: bool = True
    min: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, C = len(pool.y), self.clients, len(pool.counts)
        failed = check_minimum("dirichlet", self.min, n, N, instead="dirichlet-mix or grouped-equal")
        cap = n / N if self.cap else math.inf

        def draw() -> tuple[list[IntArray], IntArray]:
            members = [indices.copy() for indices in pool.members]

            def shares() -> Iterable[FloatArray]:
                for indices in members:  # shuffle, then draw, class by class: the order of the published code
                    rng.shuffle(indices)
                    yield rng.dirichlet(np.full(N, self.alpha))

            return members, capped_table(shares(), pool.counts, cap, rng)

        tries = max(100, min(TRIES, 200_000_000 // (n + C * (5 * N + 2500))))  # about two seconds
        drawn, rejected = redraw(draw, lambda d: int(d[1].sum(axis=1).min()), self.min, tries, failed)
        return Assigned(assign_by_table(*drawn), redraw_note(rejected))


@dataclass(frozen=True)
class DirichletMix(WithAlpha):
    """Each client a class mix from Dirichlet(alpha); prior: alpha times the class shares; sigma: lognormal sizes.

    prior: scale alpha by each class's share of the pool (Hsu et al.), else the same alpha for every class.
    sigma: standard deviation of the log of the sizes; 0 makes all clients the same size.
    """

    prior: bool = False
    sigma: Sigma = 0.0

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, left = len(pool.y), self.clients, pool.counts.copy()
        scale = left / n if self.prior else np.ones(len(left))
        mixes = renormalised(rng.dirichlet(self.alpha * scale, size=N), np.ones(1, bool), rng)
        need = lognormal_sizes(n, N, self.sigma, rng)
        table = np.zeros((N, len(left)), np.int64)
        while need.any():  # ends: a client asks again only after a class that it wants is used up
            wanted = mixes * (left > 0)
            used_up = wanted.sum(axis=1, keepdims=True) < 1e-9  # all classes of this mix: take from what is left
            p = np.where(used_up, left, wanted)
            p /= p.sum(axis=1, keepdims=True)
            requests = np.stack([rng.multinomial(k, row) for k, row in zip(need, p, strict=True)])
            by_class = zip(requests.T, left, strict=True)
            given = np.stack([fill_requests(request, int(stock), rng) for request, stock in by_class], axis=1)
            table += given
            left -= given.sum(axis=0)
            need -= given.sum(axis=1)
        return Assigned(assign_by_table(shuffled(pool.members, rng), table))


@dataclass(frozen=True)
class GroupedEqual(WithAlpha):
    """Dirichlet inside groups of ten clients, then cut again into equal parts: all clients of one size."""

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N = len(pool.y), self.clients
        groups = -(-N // 10)
        borders = 10 * n // N * np.arange(1, groups)
        workers: list[IntArray] = []
        rejected = 0
        for g, group in enumerate(np.split(rng.permutation(n), borders)):
            members = positions_by_label(pool.y[group])
            table, more = self._table([len(m) for m in members], min(10, N - 10 * g), rng)
            workers += assign_by_table([group[m] for m in members], table)
            rejected += more
        return Assigned(np.array_split(np.concatenate(workers), N), redraw_note(rejected))

    def _table(self, counts: list[int], workers: int, rng: Rng) -> tuple[IntArray, int]:
        """The first table that gives every worker half the mean or more; drawn in batches, as few tables do."""
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
        tables, rejected = redraw(draw, lambda drawn: int(smallest(drawn).max()), half, 80, failed)
        first = int(np.argmax(smallest(tables) >= half))
        return tables[first], rejected * batch + first


@dataclass(frozen=True)
class Quantity(WithAlpha):
    """Random parts with sizes by Dirichlet(alpha): the classes even, the amounts not.

    min: samples that every client must have; the sizes are drawn again until it has.
    """

    min: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N = len(pool.y), self.clients
        failed = check_minimum("quantity", self.min, n, N, instead="lognormal")
        order = rng.permutation(n)

        def draw() -> IntArray:
            return sizes_from_shares(renormalised(rng.dirichlet(np.full(N, self.alpha)), np.ones(1, bool), rng), n)

        sizes, rejected = redraw(draw, lambda drawn: int(drawn.min()), self.min, TRIES, failed)
        return Assigned(split_by_sizes(order, sizes), redraw_note(rejected))


@dataclass(frozen=True)
class Lognormal:
    """Random parts with lognormal sizes: the classes even, the amounts not.

    sigma: standard deviation of the log of the sizes; 0 makes all clients the same size.
    """

    clients: Count = 10
    sigma: Sigma = 0.3

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        sizes = lognormal_sizes(len(pool.y), self.clients, self.sigma, rng)
        return Assigned(split_by_sizes(rng.permutation(len(pool.y)), sizes))
