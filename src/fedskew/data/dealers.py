"""The dealers: how the samples of a pool come to clients. One frozen dataclass each; its fields are its settings.

Most dealers only say how many samples of each class a client gets (a table, clients x classes) and leave the
rest to `hand_out`. Sources, by dealer:

  iid, quantity, label-k  NIID-Bench (Li et al. 2022)
  dirichlet               Yurochkin et al. 2019; MOON, NIID-Bench: the same clients as their code for the same seed
  dirichlet-mix           Hsu, Qi, Brown 2019; without the prior as in FedDyn and FedCRC
  grouped-equal           FedDF, FEDIC, CReFF (code)
  lognormal               FedDyn (code)
  pcdd                    FedMR
  shards                  McMahan et al. 2017; pure as in FedRep
  two-class, subset       FedPG
  natural                 LEAF
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta

from fedskew.data.dealing import (
    Count,
    Dealt,
    FloatArray,
    IntArray,
    Pool,
    Rng,
    Spread,
    among_open,
    by_value,
    capped_table,
    check_labels,
    check_minimum,
    deal_owned,
    drawn_labels,
    granted,
    hand_out,
    in_sizes,
    lognormal_sizes,
    redraw,
    redraws,
    shards_table,
    shuffled,
    slices,
)
from fedskew.settings import Mistake

TRIES = 1000


class Dealer(Protocol):
    @property
    def clients(self) -> int | None: ...

    def __call__(self, pool: Pool, rng: Rng) -> Dealt: ...


@dataclass(frozen=True)
class WithAlpha:
    clients: Count = 10
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1e9:
            raise ValueError(f"alpha must be positive and at most 1e9, got {self.alpha:g}; for an even split use iid")


@dataclass(frozen=True)
class Iid:
    """Every client an equal random part."""

    clients: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        return Dealt(np.array_split(rng.permutation(len(pool.y)), self.clients))


@dataclass(frozen=True)
class Dirichlet(WithAlpha):
    """Each class over the clients by Dirichlet(alpha); cap: a client with its even share gets no further class."""

    cap: bool = True
    min: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
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
        dealt, thrown = redraw(draw, lambda d: int(d[1].sum(axis=1).min()), self.min, tries, failed)
        return Dealt(hand_out(*dealt), redraws(thrown))


@dataclass(frozen=True)
class DirichletMix(WithAlpha):
    """Each client a class mix from Dirichlet(alpha); prior: alpha times the class shares; sigma: lognormal sizes."""

    prior: bool = False
    sigma: Spread = 0.0

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
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
        return Dealt(hand_out(shuffled(pool.members, rng), table))


@dataclass(frozen=True)
class GroupedEqual(WithAlpha):
    """Dirichlet inside groups of ten clients, then cut again into equal parts: all clients of one size."""

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
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
        return Dealt(np.array_split(np.concatenate(workers), N), redraws(thrown))

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

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        n, N = len(pool.y), self.clients
        failed = check_minimum("quantity", self.min, n, N, instead="lognormal")
        order = rng.permutation(n)

        def draw() -> IntArray:
            return slices(among_open(rng.dirichlet(np.full(N, self.alpha)), np.ones(1, bool), rng), n)

        sizes, thrown = redraw(draw, lambda s: int(s.min()), self.min, TRIES, failed)
        return Dealt(in_sizes(order, sizes), redraws(thrown))


@dataclass(frozen=True)
class Lognormal:
    """Random parts with lognormal sizes: the classes even, the amounts not."""

    clients: Count = 10
    sigma: Spread = 0.3

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        sizes = lognormal_sizes(len(pool.y), self.clients, self.sigma, rng)
        return Dealt(in_sizes(rng.permutation(len(pool.y)), sizes))


@dataclass(frozen=True)
class Pcdd:
    """FedMR's PxCy: the classes in blocks of y to the clients in order, then y random ones; all classes: iid."""

    clients: Count = 10
    classes: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        N, C, k = self.clients, len(pool.counts), self.classes
        check_labels("pcdd", N, "classes", k, C)
        if k == C:
            return Iid(N)(pool, rng)
        label = np.arange(C)
        first = label // k == np.arange(N)[:, None]
        return deal_owned(drawn_labels(first, k, rng), pool, rng)


@dataclass(frozen=True)
class LabelK:
    """Client i gets label i mod C and k-1 random others; each class in equal parts to those that have it."""

    clients: Count = 10
    k: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        N, C = self.clients, len(pool.counts)
        check_labels("label-k", N, "k", self.k, C)
        first = np.arange(N)[:, None] % C == np.arange(C)
        failed = (
            f"label-k: {N} clients with k={self.k} left some of {C} classes without a client in {{tries}} draws; "
            "use more clients, a larger k, or pcdd, which deals every class."
        )
        owned, _ = redraw(
            lambda: drawn_labels(first, self.k, rng), lambda o: int(o.sum(axis=0).min()), 1, TRIES, failed
        )
        return deal_owned(owned, pool, rng)


@dataclass(frozen=True)
class Shards:
    """The pool sorted by label, cut into equal shards, per_client random ones each; pure: no shard has two labels."""

    clients: Count = 10
    per_client: Count = 2
    pure: bool = False

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        n, N, C, s = len(pool.y), self.clients, len(pool.counts), self.per_client
        if N * s > n:
            raise Mistake(f"shards: {N} clients x per_client={s} make {N * s} shards of only {n} samples.")
        if self.pure:
            if N * s % C:
                raise Mistake(
                    f"shards: pure=true needs clients x per_client to be a multiple of the {C} classes, got {N * s}."
                )
            labels = rng.permutation(np.repeat(np.arange(C), N * s // C)).reshape(N, s)
            return Dealt(hand_out(shuffled(pool.members, rng), shards_table(labels, pool.counts)))
        size = n // (N * s)
        ordered = np.concatenate(pool.members)[: N * s * size].reshape(N * s, size)
        left = n % (N * s)
        notes = (f"{left} samples left over",) if left else ()
        return Dealt(list(ordered[rng.permutation(N * s)].reshape(N, s * size)), notes)


@dataclass(frozen=True)
class TwoClass:
    """Every class in two halves, every client two halves of different classes; as many clients as classes."""

    clients: Count | None = None

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        C = len(pool.counts)
        if C < 2 or self.clients not in (None, C):
            raise Mistake(
                f"two-class needs two classes or more and as many clients as classes; there are {C} classes and "
                f"clients={self.clients or C}. For other numbers use shards:pure=true or label-k."
            )
        pairs = rng.permutation(np.repeat(np.arange(C), 2)).reshape(C, 2)
        for i in range(C):
            if pairs[i, 0] == pairs[i, 1]:  # both halves are here, so a swap with any other client gives no new double
                j = (i + 1 + rng.randint(C - 1)) % C
                pairs[i, 1], pairs[j, 0] = pairs[j, 0], pairs[i, 1]
        return Dealt(hand_out(shuffled(pool.members, rng), shards_table(pairs, pool.counts)))


@dataclass(frozen=True)
class Subset:
    """Every client has every class, one of them (i mod C) with this share; clients are a multiple of the classes."""

    clients: Count = 10
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.95

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        N, C, a = self.clients, len(pool.counts), self.share
        if N % C:
            raise Mistake(f"subset: clients must be a multiple of the {C} classes, got {N}; {C * -(-N // C)} would do.")
        g = N // C
        main, tail = a / g, (1 - a) / max(N - g, 1)
        weights = np.where(np.arange(N) % C == np.arange(C)[:, None], main, tail)  # [classes, clients]
        table = slices(weights / weights.sum(axis=1, keepdims=True), pool.counts[:, None]).T
        short = int((table == 0).any(axis=0).sum())
        notes = (f"{short} classes have too few samples to be on every client",) if short else ()
        return Dealt(hand_out(shuffled(pool.members, rng), table), notes)


@dataclass(frozen=True)
class Natural:
    """A client is whoever made the samples; those with min samples or more, or a seeded choice of them."""

    clients: Count | None = None
    min: Count = 1

    def __call__(self, pool: Pool, rng: Rng) -> Dealt:
        if pool.owners is None:
            raise Mistake("natural needs data that say who made each sample; these do not. Use another split.")
        ids, owner, counts = np.unique(pool.owners, return_inverse=True, return_counts=True)
        able = np.flatnonzero(counts >= self.min)
        N = self.clients or len(able)
        if not 0 < N <= len(able):
            raise Mistake(
                f"natural: {len(able)} of {len(ids)} owners have min={self.min} samples or more, too few for "
                f"clients={max(N, 1)}; use a smaller min or fewer clients."
            )
        members = by_value(owner.reshape(-1))
        clients = [members[i] for i in np.sort(rng.choice(able, N, replace=False))]
        out = len(pool.y) - sum(map(len, clients))
        return Dealt(clients, (f"{out} samples of {len(ids) - N} owners left out",) if out else ())


DEALERS: dict[str, type[Dealer]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-mix": DirichletMix,
    "grouped-equal": GroupedEqual,
    "quantity": Quantity,
    "lognormal": Lognormal,
    "pcdd": Pcdd,
    "label-k": LabelK,
    "shards": Shards,
    "two-class": TwoClass,
    "subset": Subset,
    "natural": Natural,
}
