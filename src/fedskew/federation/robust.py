"""Aggregation that a few hostile clients cannot decide: rules in place of the mean, and mixing before them.

A rule works on whole updates (parameters, prototypes, control variates, ... as one vector per client), so it composes
with every method whose server needs only sums over clients: the method gets the robust mean, once for each client, with
equal weights. With f = `attackers` of K clients:

    trimmed     in each entry, the mean without the f largest and the f smallest values
    median      in each entry, the median
    geometric   the point with the smallest sum of distances to the updates (Weiszfeld's iteration)
    krum        the mean of the K - f updates that are nearest to their K - f - 2 nearest neighbours (Multi-Krum)
    mean        the mean, with equal weights

    nnm         first replace each update by the mean of its K - f nearest ones, itself included (arXiv:2302.01772)
    bucketing   first replace the updates by the means of random pairs (arXiv:2006.09365)

Under skew, honest clients with rare classes look like attackers: `shares` says how much of each client was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Natural

Rule = Literal["mean", "trimmed", "median", "geometric", "krum"]
Mixing = Literal["none", "nnm", "bucketing"]
BUCKET = 2  # updates per bucket
STEPS, NEAR = 50, 1e-9  # Weiszfeld's iteration: at most so many steps, until it moves by less than this share


@dataclass(frozen=True)
class Robust:
    """How updates are aggregated when some clients may be hostile.

    rule: what takes the place of the mean; "mean" (with mixing "none") changes nothing.
    mixing: what is done to the updates before.
    attackers: how many hostile clients of a round to withstand.
    """

    rule: Rule = "mean"
    mixing: Mixing = "none"
    attackers: Natural = 1

    @property
    def on(self) -> bool:
        """Whether anything differs from the plain mean."""
        return self.rule != "mean" or self.mixing != "none"

    def check(self, cohort: int) -> None:
        """Raise UsageError if a cohort of this size cannot withstand so many attackers."""
        if self.on and cohort <= 2 * self.attackers:
            raise UsageError(
                f"robust.attackers={self.attackers} is invalid: with {cohort} clients a round, at most "
                f"{max((cohort - 1) // 2, 0)} attackers can be withstood."
            )


def robust_updates(updates: Iterable[Update], robust: Robust, rng: torch.Generator) -> tuple[list[Update], list[float]]:
    """The same robust mean once for each client, for the method to aggregate; and how much of each client is in it."""
    given = list(updates)
    if not given:
        return [], []
    robust.check(len(given))
    vectors, use = torch.stack([flat(update.payload) for update in given]), torch.eye(len(given), dtype=torch.float64)
    if robust.mixing != "none":
        use = nearest_means(vectors, robust.attackers) if robust.mixing == "nnm" else buckets(len(given), rng)
        vectors = (use @ vectors.double()).to(vectors.dtype)
    # a bucket with an attacker is hostile, so as many buckets as attackers may be
    center, shares = RULES[robust.rule](vectors, min(robust.attackers, (len(vectors) - 1) // 2))
    payload = unflat(center, [update.payload for update in given])
    weight = sum(update.weight for update in given) / len(given)
    return [replace(update, payload=payload, weight=weight) for update in given], (shares @ use).tolist()


def left_out(shares: Mapping[int, float]) -> set[int]:
    """Clients of a round that were used by less than half as much as if all were used alike.

    >>> sorted(left_out({0: 0.5, 1: 0.5, 2: 0.0, 7: 0.0}))
    [2, 7]
    """
    return {client for client, share in shares.items() if share < 0.5 / len(shares)}


def mean_left_out(rounds: Iterable[Mapping[int, float]]) -> float | None:
    """Mean over rounds of the share of clients that were left out; None if no round had robust aggregation."""
    found = [len(left_out(shares)) / len(shares) for shares in rounds if shares]
    return sum(found) / len(found) if found else None


def flat(payload: Payload) -> Tensor:
    """All floating-point tensors of a payload as one vector."""
    parts = [t.reshape(-1) for tensors in payload.values() for t in tensors.values() if t.is_floating_point()]
    return torch.cat([part.to(torch.float32) for part in parts]) if parts else torch.empty(0)


def unflat(vector: Tensor, like: Sequence[Payload]) -> Payload:
    """A payload from a vector as `flat` makes it. Integer tensors are the largest of those in `like`, as in `Mean`."""
    made: Payload = {}
    start = 0
    for group, tensors in like[0].items():
        made[group] = Tensors()
        for name, t in tensors.items():
            if t.is_floating_point():
                made[group][name] = vector[start : start + t.numel()].reshape(t.shape).to(t.dtype)
                start += t.numel()
            else:
                made[group][name] = torch.stack([payload[group][name] for payload in like]).amax(0)
    return made


def square_distances(vectors: Tensor) -> Tensor:
    """Squared distances between all pairs.  # [K, K], float64"""
    rows = [(vectors - vector).double().square().sum(1) for vector in vectors]
    return torch.stack(rows)


def nearest_means(vectors: Tensor, attackers: int) -> Tensor:
    """NNM as a matrix: row k averages the K - f updates nearest to update k, itself included."""
    count = len(vectors)
    nearest = square_distances(vectors).argsort(dim=1, stable=True)[:, : count - attackers]
    use = torch.zeros(count, count, dtype=torch.float64)
    return use.scatter_(1, nearest, 1 / (count - attackers))


def buckets(count: int, rng: torch.Generator) -> Tensor:
    """Bucketing as a matrix: each row averages a random pair; the last one may be alone."""
    order = torch.randperm(count, generator=rng)
    rows = [
        torch.zeros(count, dtype=torch.float64).index_fill_(0, part, 1 / len(part))
        for part in torch.split(order, BUCKET)
    ]
    return torch.stack(rows)


def equal_shares(count: int) -> Tensor:
    """Every update used alike."""
    return torch.full((count,), 1 / count, dtype=torch.float64)


def mean(vectors: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
    """The mean."""
    return vectors.double().mean(0), equal_shares(len(vectors))


def trimmed(vectors: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
    """In each entry the mean without the `attackers` largest and smallest values."""
    order = vectors.argsort(dim=0, stable=True)
    kept = order[attackers : len(vectors) - attackers]
    shares = torch.bincount(kept.reshape(-1), minlength=len(vectors)).double() / max(kept.numel(), 1)
    return vectors.gather(0, kept).double().mean(0), shares


def median(vectors: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
    """In each entry the median; of an even number, the mean of the middle two."""
    return trimmed(vectors, (len(vectors) - 1) // 2)


def geometric(vectors: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
    """The geometric median."""
    points = vectors.double()
    center, weights = points.mean(0), equal_shares(len(points))
    for _ in range(STEPS):
        distances = (points - center).norm(dim=1).clamp(min=1e-12)
        weights = (1 / distances) / (1 / distances).sum()
        moved = weights @ points
        if (moved - center).norm() <= NEAR * (1 + center.norm()):
            return moved, weights
        center = moved
    return center, weights


def krum(vectors: Tensor, attackers: int) -> tuple[Tensor, Tensor]:
    """The mean of the K - f updates with the smallest sums of squared distances to their nearest neighbours."""
    count = len(vectors)
    neighbours = max(count - attackers - 2, 1)
    scores = square_distances(vectors).sort(dim=1).values[:, 1 : neighbours + 1].sum(1)
    chosen = scores.argsort(stable=True)[: count - attackers]
    shares = torch.zeros(count, dtype=torch.float64).index_fill_(0, chosen, 1 / len(chosen))
    return vectors[chosen].double().mean(0), shares


RULES: dict[Rule, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "mean": mean,
    "trimmed": trimmed,
    "median": median,
    "geometric": geometric,
    "krum": krum,
}
