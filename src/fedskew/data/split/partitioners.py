"""The dealers: how the samples of a pool come to clients. One frozen dataclass each; its fields are its settings.

Most dealers only say how many samples of each class a client gets (a table, clients x classes) and leave the
rest to `hand_out`. Those that draw from a distribution are in drawn.py. Sources, by dealer:

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

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta

from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import (
    Assigned,
    Count,
    Pool,
    Rng,
    assign_owned,
    by_value,
    check_labels,
    drawn_labels,
    hand_out,
    redraw,
    shards_table,
    shuffled,
    slices,
)
from fedskew.data.split.dirichlet import TRIES, Dirichlet, DirichletMix, GroupedEqual, Lognormal, Quantity


class Partitioner(Protocol):
    @property
    def clients(self) -> int | None: ...

    def __call__(self, pool: Pool, rng: Rng) -> Assigned: ...


@dataclass(frozen=True)
class Iid:
    """Every client an equal random part."""

    clients: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        return Assigned(np.array_split(rng.permutation(len(pool.y)), self.clients))


@dataclass(frozen=True)
class Pcdd:
    """FedMR's PxCy: the classes in blocks of y to the clients in order, then y random ones; all classes: iid."""

    clients: Count = 10
    classes: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        N, C, k = self.clients, len(pool.counts), self.classes
        check_labels("pcdd", N, "classes", k, C)
        if k == C:
            return Iid(N)(pool, rng)
        label = np.arange(C)
        first = label // k == np.arange(N)[:, None]
        return assign_owned(drawn_labels(first, k, rng), pool, rng)


@dataclass(frozen=True)
class LabelK:
    """Client i gets label i mod C and k-1 random others; each class in equal parts to those that have it."""

    clients: Count = 10
    k: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
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
        return assign_owned(owned, pool, rng)


@dataclass(frozen=True)
class Shards:
    """The pool sorted by label, cut into equal shards, per_client random ones each; pure: no shard has two labels."""

    clients: Count = 10
    per_client: Count = 2
    pure: bool = False

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, C, s = len(pool.y), self.clients, len(pool.counts), self.per_client
        if N * s > n:
            raise UsageError(f"shards: {N} clients x per_client={s} make {N * s} shards of only {n} samples.")
        if self.pure:
            if N * s % C:
                raise UsageError(
                    f"shards: pure=true needs clients x per_client to be a multiple of the {C} classes, got {N * s}."
                )
            labels = rng.permutation(np.repeat(np.arange(C), N * s // C)).reshape(N, s)
            return Assigned(hand_out(shuffled(pool.members, rng), shards_table(labels, pool.counts)))
        size = n // (N * s)
        ordered = np.concatenate(pool.members)[: N * s * size].reshape(N * s, size)
        left = n % (N * s)
        notes = (f"{left} samples left over",) if left else ()
        return Assigned(list(ordered[rng.permutation(N * s)].reshape(N, s * size)), notes)


@dataclass(frozen=True)
class TwoClass:
    """Every class in two halves, every client two halves of different classes; as many clients as classes."""

    clients: Count | None = None

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        C = len(pool.counts)
        if C < 2 or self.clients not in (None, C):
            raise UsageError(
                f"two-class needs two classes or more and as many clients as classes; there are {C} classes and "
                f"clients={self.clients or C}. For other numbers use shards:pure=true or label-k."
            )
        pairs = rng.permutation(np.repeat(np.arange(C), 2)).reshape(C, 2)
        for i in range(C):
            if pairs[i, 0] == pairs[i, 1]:  # both halves are here, so a swap with any other client gives no new double
                j = (i + 1 + rng.randint(C - 1)) % C
                pairs[i, 1], pairs[j, 0] = pairs[j, 0], pairs[i, 1]
        return Assigned(hand_out(shuffled(pool.members, rng), shards_table(pairs, pool.counts)))


@dataclass(frozen=True)
class Subset:
    """Every client has every class, one of them (i mod C) with this share; clients are a multiple of the classes."""

    clients: Count = 10
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.95

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        N, C, a = self.clients, len(pool.counts), self.share
        if N % C:
            raise UsageError(
                f"subset: clients must be a multiple of the {C} classes, got {N}; {C * -(-N // C)} would do."
            )
        g = N // C
        main, tail = a / g, (1 - a) / max(N - g, 1)
        weights = np.where(np.arange(N) % C == np.arange(C)[:, None], main, tail)  # [classes, clients]
        table = slices(weights / weights.sum(axis=1, keepdims=True), pool.counts[:, None]).T
        short = int((table == 0).any(axis=0).sum())
        notes = (f"{short} classes have too few samples to be on every client",) if short else ()
        return Assigned(hand_out(shuffled(pool.members, rng), table), notes)


@dataclass(frozen=True)
class Natural:
    """A client is whoever made the samples; those with min samples or more, or a seeded choice of them."""

    clients: Count | None = None
    min: Count = 1

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        if pool.owners is None:
            raise UsageError("natural needs data that say who made each sample; these do not. Use another split.")
        ids, owner, counts = np.unique(pool.owners, return_inverse=True, return_counts=True)
        able = np.flatnonzero(counts >= self.min)
        N = self.clients or len(able)
        if not 0 < N <= len(able):
            raise UsageError(
                f"natural: {len(able)} of {len(ids)} owners have min={self.min} samples or more, too few for "
                f"clients={max(N, 1)}; use a smaller min or fewer clients."
            )
        members = by_value(owner.reshape(-1))
        clients = [members[i] for i in np.sort(rng.choice(able, N, replace=False))]
        out = len(pool.y) - sum(map(len, clients))
        return Assigned(clients, (f"{out} samples of {len(ids) - N} owners left out",) if out else ())


PARTITIONERS: dict[str, type[Partitioner]] = {
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
