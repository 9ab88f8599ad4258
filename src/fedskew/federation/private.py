"""Client-level differential privacy: whole updates are clipped, and noise is added to their sum.

An update becomes one vector: changes of parameters, sums of class statistics, changes of control variates, each group
times a fixed scale (`GROUPS`) so that no group uses up the bound of the others. With C = `clip`, z = `noise`:

    v_k    = update k as a vector, times min(1, C / |v_k|)
    total  = sum_k v_k + N(0, (z C)^2)

The method gets total / K once for each of the K clients, with equal weights, so it must need only sums over clients.
Class statistics are weighted by the share of the client's samples that the class has, whatever the method's weights.
What an observer learns from all rounds about any one client is bounded by epsilon (at delta), see accounting.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, NotNegative, Positive
from fedskew.federation.accounting import noise_for, spent_on
from fedskew.federation.ledger import Ledger
from fedskew.federation.robust import flat, unflat
from fedskew.federation.wire import Layout

COUNT = "count"  # name of the tensor with samples by class
PER_CLIENT = 1000.0  # samples that each client counts for in the class counts which a method gets
KNOWN = 2.0  # a class counts as known if its noisy count is above this many standard deviations of the noise
FEW, WEAK = 50, 10.0  # with fewer clients, or a larger epsilon, the user is warned


@dataclass(frozen=True)
class Privacy:
    """What may leave a site, and differential privacy of clients.

    min_count: a class statistic (prototype, moments, gradient, count) of fewer samples is not sent; None: 1, so all are
        sent, in a simulation, and 5 between real sites.
    epsilon: the budget of the whole run; the noise is chosen for it. None: `noise` decides.
    noise: standard deviation of the noise on the sum of updates, relative to `clip`; 0: no noise, no privacy.
    clip: largest norm of a client's update, all groups together.
    delta: probability with which the bound of epsilon may fail; it should be well below 1 / clients.
    """

    min_count: Count | None = None
    epsilon: Positive | None = None
    noise: NotNegative = 0.0
    clip: Positive = 1.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5

    @property
    def on(self) -> bool:
        """Whether updates are clipped and noise is added."""
        return self.epsilon is not None or self.noise > 0

    def plan(
        self, rounds: int, cohort: int, population: int, seed: int | None, ledger: Ledger | None = None, done: int = 0
    ) -> Plan | None:
        """The noise of a run with so many rounds in all and clients; None without differential privacy.

        `seed` is that of a simulation. With None the noise comes from the operating system, and cohorts count as known
        to everyone: sites are told the seed that draws them, so that drawing does not add to their privacy.
        `ledger` are the noisy sums that were released already, `done` is the number of finished rounds. If rounds are
        repeated with new noise, the noise of the rest is raised, so that the budget is kept.
        """
        if not self.on:
            return None
        if self.epsilon is not None and self.noise:
            raise UsageError("privacy.epsilon and privacy.noise exclude each other: give the budget or the noise.")
        drawn = cohort if seed is not None else population
        noise = self.noise or noise_for(self.epsilon or 0.0, rounds, drawn, population, self.delta)
        plan = Plan(noise, self.clip, self.delta, drawn, population, seed, ledger or Ledger())
        plan.ledger.fill(done, noise)
        left = plan.to_come(rounds, done)
        if self.epsilon is None or seed is not None or not left or plan.epsilon(left) <= self.epsilon:
            return plan
        more = noise_for(self.epsilon, left, drawn, population, self.delta, plan.ledger.counted())
        return replace(plan, noise=more)


@dataclass(frozen=True)
class Plan:
    """Differential privacy of one run: see `Privacy.plan`."""

    noise: float
    clip: float
    delta: float
    cohort: int  # clients that are drawn for a round, of `population`; all of them: drawing adds no privacy
    population: int
    seed: int | None
    ledger: Ledger = field(default_factory=Ledger)  # what was released so far

    def epsilon(self, rounds: int = 0) -> float:
        """What is spent on the releases in the ledger, and after so many rounds more."""
        releases = dict(self.ledger.counted())
        if rounds:
            releases[self.noise] = releases.get(self.noise, 0) + rounds
        return spent_on(tuple(sorted(releases.items())), self.cohort, self.population, self.delta)

    def to_come(self, rounds: int, done: int) -> int:
        """How many noisy sums the rest of a run releases, after `done` of its rounds.

        With noise from a seed, rounds that are repeated release nothing new.
        """
        known = done if self.seed is None else len({release.round for release in self.ledger.releases})
        return max(0, rounds - known)

    def draw(self, round: int) -> Callable[[int], Tensor]:
        """A function that gives n values of N(0, 1) for the noise of a round."""
        if self.seed is None:
            return system_noise
        rng = seeded(self.seed, Purpose.PRIVACY, 0, round)
        return partial(torch.randn, generator=rng, dtype=torch.float64)

    def warning(self, rounds: int) -> str:
        """One sentence if the guarantee says little after so many rounds more; "" if it says something."""
        epsilon = self.epsilon(rounds)
        if epsilon <= WEAK and self.population >= FEW:
            return ""
        return (
            f"client-level differential privacy says little here: epsilon is {epsilon:.3g} (delta {self.delta:g}) with "
            f"{self.population} clients. More clients, fewer rounds or more noise would help; with few sites only "
            "privacy of single records would, which is not offered."
        )


class Group(NamedTuple):
    """How a group of an update becomes part of the vector."""

    kind: Literal["change", "sum", "classes"]  # minus the broadcast; as it is; class statistics with a count
    scale: float


GROUPS = {
    "parameters": Group("change", 1.0),
    "extra": Group("change", 1.0),
    "direction": Group("sum", 10.0),  # a change divided by the number of steps
    "steps": Group("sum", 0.01),
    "control": Group("sum", 1.0),
    "gradient": Group("sum", 1.0),
    "prototypes": Group("classes", 0.2),
    "class_sums": Group("classes", 0.2),
}
COUNT_SCALE = 0.5  # of the shares of classes


def check_layout(layout: Layout, method: str) -> None:
    """Raise UsageError if updates of this layout cannot be clipped and noised as a whole."""
    for group, name, kind, _ in layout:
        if group == "buffers":
            raise UsageError(
                "with differential privacy batch-norm statistics are not sent: set training.batch_norm to frozen or "
                "local, or use a model without batch norm."
            )
        if group not in GROUPS or not kind.startswith("F"):
            raise UsageError(
                f"method {method} cannot have differential privacy: it sends {group}/{name}, which has no fixed scale."
            )


def private_updates(
    updates: Iterable[Update], broadcast: Payload, plan: Plan, normal: Callable[[int], Tensor], round: int = 0
) -> list[Update]:
    """The same noisy mean once for each client, for the method to aggregate; one update is held at a time.

    The noisy sum is in the plan's ledger when this returns.
    """
    given: list[Update] = []
    like: Payload = {}
    total = torch.empty(0)
    for update in updates:
        vector = clipped(flat(scaled(update.payload, broadcast)).double(), plan.clip)
        total = total + vector if given else vector
        like = like or update.payload
        given.append(replace(update, payload={}, weight=1.0))
    if not given:
        return []
    total = total + plan.noise * plan.clip * normal(len(total))
    plan.ledger.record(round, plan.noise, total)
    payload = unscaled(unflat(total, [like]), broadcast, len(given), plan.noise * plan.clip)
    return [replace(update, payload=payload) for update in given]


def clipped(vector: Tensor, clip: float) -> Tensor:
    """The vector, shortened to the norm `clip` if it is longer.

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0).tolist(), clipped(torch.tensor([0.3, 0.4]), 1.0).tolist()
    ([0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645])
    """
    norm = float(vector.norm())
    return vector * (clip / norm) if norm > clip else vector


def check_shortening(layout: Layout) -> None:
    """Raise UsageError if `shortened` cannot bound updates of this layout: only changes and sums can be shortened."""
    for group, name, kind, _ in layout:
        if group not in GROUPS or GROUPS[group].kind == "classes" or not kind.startswith("F"):
            raise UsageError(f"updates have {group}/{name}, which cannot be shortened without changing what it means.")


def shortened(payload: Payload, broadcast: Payload, clip: float) -> tuple[Payload, float]:
    """(an update whose norm, as the server measures it, is at most `clip`, its norm before); see `check_shortening`."""
    norm = float(flat(scaled(payload, broadcast)).double().norm())
    if norm <= clip:
        return payload, norm
    made: Payload = {}
    for group, tensors in payload.items():
        if not tensors:
            made[group] = tensors
        elif GROUPS[group].kind == "change":
            start = broadcast[group].like(tensors)
            made[group] = start + (tensors - start) * (clip / norm)
        else:
            made[group] = tensors * (clip / norm)
    return made, norm


def scaled(payload: Payload, broadcast: Payload) -> Payload:
    """An update as changes and sums, each group times its scale."""
    made: Payload = {}
    for group, tensors in payload.items():
        kind, scale = GROUPS[group] if tensors else Group("sum", 1.0)
        if kind == "change":
            tensors = tensors - broadcast[group].like(tensors)
        elif kind == "classes":
            share = tensors[COUNT] / tensors[COUNT].sum().clamp(min=1)
            part = share / tensors[COUNT].clamp(min=1)  # 1 / the client's samples, for classes it has
            tensors = Tensors(
                {name: _by_class(share if name == "mean" else part, t) for name, t in tensors.items() if name != COUNT}
            ) | {COUNT: share * (COUNT_SCALE / scale)}
            tensors = tensors.like(payload[group])
        made[group] = tensors * scale
    return made


def unscaled(total: Payload, broadcast: Payload, clients: int, deviation: float) -> Payload:
    """The mean update from a noisy sum of `scaled` ones; `deviation` is the noise's in the scaled sum."""
    made: Payload = {}
    for group, tensors in total.items():
        kind, scale = GROUPS[group] if tensors else Group("sum", 1.0)
        mean = tensors / (scale * clients)
        if kind == "change":
            mean = mean + broadcast[group].like(mean)
        elif kind == "classes":
            share = mean[COUNT] * (scale / COUNT_SCALE)
            known = share * clients > max(KNOWN * deviation / COUNT_SCALE, 1e-9)
            share = torch.where(known, share, 0.0)
            mean = Tensors(
                {
                    name: _by_class(known / share.clamp(min=1e-12) if name == "mean" else known * PER_CLIENT, t)
                    for name, t in mean.items()
                }
            ) | {COUNT: share * PER_CLIENT}
            mean = mean.like(tensors)
        made[group] = mean
    return made


def _by_class(factor: Tensor, t: Tensor) -> Tensor:
    """Each class's part of a tensor [classes, ...], times its factor."""
    return (factor.view(-1, *[1] * (t.dim() - 1)) * t).to(t.dtype)


def system_noise(n: int) -> Tensor:
    """n values of N(0, 1) from the operating system's random numbers (Box and Muller)."""
    bits = np.frombuffer(os.urandom(16 * n), np.uint64).reshape(2, n) >> 11
    u, v = (bits + 1) / 2.0**53, bits / 2.0**53
    return torch.from_numpy(np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * v[1]))
