"""Partitioners: which client gets which samples of a pool. One frozen dataclass each; its fields are its settings.

Most decide only how many samples of each class a client gets (a table, clients x classes); `assign_by_table` does the
rest. Those that draw from a distribution are in dirichlet.py. Sources:

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
    assign_by_table,
    assign_to_holders,
    check_labels_per_client,
    draw_labels,
    positions_by_label,
    redraw,
    shards_table,
    shuffled,
    sizes_from_shares,
)
from fedskew.data.split.dirichlet import TRIES, Dirichlet, DirichletMix, GroupedEqual, Lognormal, Quantity


class Partitioner(Protocol):
    """(pool, generator) -> each client's positions in the pool."""

    @property
    def clients(self) -> int | None:
        """How many clients; None: the data decide."""

    def __call__(self, pool: Pool, rng: Rng) -> Assigned: ...


@dataclass(frozen=True)
class Iid:
    """Every client an equal random part, sizes within one."""

    clients: Count = 10

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        return Assigned(np.array_split(rng.permutation(len(pool.y)), self.clients))


@dataclass(frozen=True)
class Pcdd:
    """FedMR's PxCy: the first clients get the classes in blocks, the others random ones; with all classes: iid.

    classes: how many each client has. Each class goes in equal parts to the clients that have it.
    """

    clients: Count = 10
    classes: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        N, C, k = self.clients, len(pool.counts), self.classes
        check_labels_per_client("pcdd", N, "classes", k, C)
        if k == C:
            return Iid(N)(pool, rng)
        label = np.arange(C)
        required = label // k == np.arange(N)[:, None]
        return assign_to_holders(draw_labels(required, k, rng), pool, rng)


@dataclass(frozen=True)
class LabelK:
    """Client i gets label i mod C and k-1 random others; each class in equal parts to the clients that have it."""

    clients: Count = 10
    k: Count = 2

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        N, C = self.clients, len(pool.counts)
        check_labels_per_client("label-k", N, "k", self.k, C)
        required = np.arange(N)[:, None] % C == np.arange(C)
        failed = (
            f"label-k: {N} clients with k={self.k} left some of {C} classes without a client in {{tries}} draws; "
            "use more clients, a larger k, or pcdd, which assigns every class."
        )
        holds, _ = redraw(
            lambda: draw_labels(required, self.k, rng), lambda drawn: int(drawn.sum(axis=0).min()), 1, TRIES, failed
        )
        return assign_to_holders(holds, pool, rng)


@dataclass(frozen=True)
class Shards:
    """The pool sorted by label, cut into equal shards, per_client random ones each; pure: no shard has two labels.

    per_client: shards of each client.
    pure: cut each class by itself, sizes within one; clients x per_client must be a multiple of the classes. Otherwise
        a shard may cross from one label to the next, and what does not divide evenly is left over.
    """

    clients: Count = 10
    per_client: Count = 2
    pure: bool = False

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        n, N, C, s = len(pool.y), self.clients, len(pool.counts), self.per_client
        if N * s > n:
            raise UsageError(f"shards: clients={N} x per_client={s} is invalid: expected at most {n}, the samples.")
        if self.pure:
            if N * s % C:
                raise UsageError(
                    f"shards: clients={N} x per_client={s} is invalid with pure=true: expected a multiple of the "
                    f"{C} classes, got {N * s}."
                )
            labels = rng.permutation(np.repeat(np.arange(C), N * s // C)).reshape(N, s)
            return Assigned(assign_by_table(shuffled(pool.members, rng), shards_table(labels, pool.counts)))
        size = n // (N * s)
        ordered = np.concatenate(pool.members)[: N * s * size].reshape(N * s, size)
        unused = n % (N * s)
        notes = (f"{unused} samples left over",) if unused else ()
        return Assigned(list(ordered[rng.permutation(N * s)].reshape(N, s * size)), notes)


@dataclass(frozen=True)
class TwoClass:
    """Every class in two halves, every client two halves of different classes; as many clients as classes.

    clients: may be left out; if given, must be the number of classes.
    """

    clients: Count | None = None

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        C = len(pool.counts)
        if C < 2 or self.clients not in (None, C):
            raise UsageError(
                f"two-class: clients={self.clients or C} is invalid for {C} classes: expected two classes or more and "
                "as many clients; for other numbers use shards:pure=true or label-k."
            )
        pairs = rng.permutation(np.repeat(np.arange(C), 2)).reshape(C, 2)
        for i in range(C):
            if pairs[i, 0] == pairs[i, 1]:  # both halves of a class: a swap with any other client makes no new pair
                j = (i + 1 + rng.randint(C - 1)) % C
                pairs[i, 1], pairs[j, 0] = pairs[j, 0], pairs[i, 1]
        return Assigned(assign_by_table(shuffled(pool.members, rng), shards_table(pairs, pool.counts)))


@dataclass(frozen=True)
class Subset:
    """Every client has every class, one of them (i mod C) with this share; clients are a multiple of the classes.

    share: part of a client's samples that are of its main class, if the classes of the pool are even.
    """

    clients: Count = 10
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.95

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        N, C, a = self.clients, len(pool.counts), self.share
        if N % C:
            raise UsageError(
                f"subset: clients={N} is invalid: expected a multiple of the {C} classes, such as {C * -(-N // C)}."
            )
        g = N // C
        main, tail = a / g, (1 - a) / max(N - g, 1)
        weights = np.where(np.arange(N) % C == np.arange(C)[:, None], main, tail)  # [classes, clients]
        table = sizes_from_shares(weights / weights.sum(axis=1, keepdims=True), pool.counts[:, None]).T
        short = int((table == 0).any(axis=0).sum())
        notes = (f"{short} classes have too few samples to be on every client",) if short else ()
        return Assigned(assign_by_table(shuffled(pool.members, rng), table), notes)


@dataclass(frozen=True)
class Natural:
    """A client is whoever made the samples; those with min samples or more, or a seeded choice of them.

    clients: how many owners to choose; left out: all with min samples.
    min: samples an owner needs.
    """

    clients: Count | None = None
    min: Count = 1

    def __call__(self, pool: Pool, rng: Rng) -> Assigned:
        if pool.owners is None:
            raise UsageError("natural is invalid for these data: expected data that say who made each sample.")
        ids, owner, counts = np.unique(pool.owners, return_inverse=True, return_counts=True)
        eligible = np.flatnonzero(counts >= self.min)
        N = self.clients or len(eligible)
        if not 0 < N <= len(eligible):
            raise UsageError(
                f"natural: {len(eligible)} of {len(ids)} owners have min={self.min} samples or more, too few for "
                f"clients={max(N, 1)}: expected a smaller min or fewer clients."
            )
        members = positions_by_label(owner.reshape(-1))
        clients = [members[i] for i in np.sort(rng.choice(eligible, N, replace=False))]
        unused = len(pool.y) - sum(map(len, clients))
        return Assigned(clients, (f"{unused} samples of {len(ids) - N} owners left out",) if unused else ())


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
