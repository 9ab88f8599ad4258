"""What methods against client drift share: corrected objectives, and gradients estimated from local steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

import torch

from fedskew.core.losses import Corrected
from fedskew.core.method import Meant, Update
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training

Weighting = Literal["samples", "uniform"]
WEIGHTING = "Objective: samples, the mean loss over all samples; uniform, the mean over clients, each counting alike."
WEIGHTING_SOURCE = "the authors' code; uniform is the paper's Algorithm 1"
SAMPLES = "samples"  # group of the server's payload: samples and number of the updates so far, to know their mean


def is_sgd(training: Training, share: float) -> bool:
    """Whether clients train with SGD, with momentum or without."""
    return training.optimiser == "sgd"


def is_plain_sgd(training: Training, share: float) -> bool:
    """Whether clients train with SGD without momentum."""
    return training.optimiser == "sgd" and training.momentum == 0


PLAIN_SGD = Meant(
    "SGD without momentum",
    "as its authors train: momentum carries a correction over into steps where it no longer fits",
    is_plain_sgd,
)


def tethered(loss: Loss, anchor: Tensors, strength: float) -> Loss:
    """loss + strength/2 |w - anchor|^2, which adds strength (w - anchor) to the gradient; strength 0: the loss."""
    if strength == 0:
        return loss
    if isinstance(loss, Corrected) and loss.anchor is None:
        return replace(loss, anchor=anchor, strength=strength)
    return Corrected(loss, anchor=anchor, strength=strength)


def tilted(loss: Loss, direction: Tensors) -> Loss:
    """loss + <w, direction>, which adds `direction` to the gradient."""
    if isinstance(loss, Corrected) and loss.tilt is None:
        return replace(loss, tilt=direction)
    return Corrected(loss, tilt=direction)


def effective_steps(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """The factor a in x - y = lr a g, if SGD takes `steps` steps from x to y along a constant gradient g.

    K plain steps: K. Momentum rho: [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho). A proximal term mu/2 |w - x|^2, with
    pull = lr mu: sum over j < K of (1 - pull)^j.
    """
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * moved
        moved += velocity
    return moved


def next_control(c_i: Tensors, c: Tensors, moved: Tensors, length: float) -> Tensors:
    """A client's next control variate: c_i - c + (x - y) / length, with moved = x - y and length = steps times lr.

    (x - y) / length is the client's mean gradient. A client that took no step (length 0) keeps c_i.
    """
    return c_i - c + moved / length if length else c_i


class Counted:
    """A stream of updates that counts them: once it has been read, `count` is |S| and `weight` the sum of weights."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self.updates, self.count, self.weight = updates, 0, 0.0

    def __iter__(self) -> Iterator[Update]:
        for update in self.updates:
            self.count += 1
            self.weight += update.weight
            yield update


def no_samples(weighting: Weighting) -> Payload:
    """The group SAMPLES before the first round; empty with uniform weighting."""
    if weighting == "uniform":
        return {}
    return {SAMPLES: Tensors({name: torch.zeros((), dtype=torch.float64) for name in ("total", "updates")})}


def more_samples(server: Payload, cohort: Counted) -> Payload:
    """The group SAMPLES after a cohort's updates; empty if the server has no such group (uniform weighting)."""
    if SAMPLES not in server:
        return {}
    new = {"total": cohort.weight, "updates": float(cohort.count)}
    return {SAMPLES: Tensors({name: server[SAMPLES][name] + value for name, value in new.items()})}


def relative_size(site: Site, broadcast: Payload, alpha: float) -> float:
    """w_i: this client's number of samples over the mean of all updates so far.

    1 with uniform weighting, in the first round, where no mean is known, and for a client without samples. At least
    lr alpha, so that a step of SGD along the pull alpha / w_i does not overshoot, however few samples a client has.
    """
    known = broadcast.get(SAMPLES)
    if known is None or not known["updates"] or not len(site.data):
        return 1.0
    return max(len(site.data) * float(known["updates"]) / float(known["total"]), site.training.lr * alpha)
