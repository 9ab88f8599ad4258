"""What methods against client drift share: changed objectives, and the gradient read from where local steps led."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedskew.core.losses import Corrected
from fedskew.core.method import Update
from fedskew.core.site import Loss
from fedskew.core.tensors import Tensors


def tethered(loss: Loss, anchor: Tensors, strength: float) -> Loss:
    """loss + strength/2 |w - anchor|^2: its gradient gains strength (w - anchor)."""
    if strength == 0:
        return loss
    if isinstance(loss, Corrected) and loss.anchor is None:
        return replace(loss, anchor=anchor, strength=strength)
    return Corrected(loss, anchor=anchor, strength=strength)


def tilted(loss: Loss, direction: Tensors) -> Loss:
    """loss + <w, direction>: its gradient gains the direction."""
    if isinstance(loss, Corrected) and loss.tilt is None:
        return replace(loss, tilt=direction)
    return Corrected(loss, tilt=direction)


def effective_steps(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """The a in x - y = lr a g, for this many steps of SGD along a constant gradient g.

    K plain steps: K. Momentum rho: [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho). A proximal term
    mu/2 |w - x|^2, with pull = lr mu: sum over j < K of (1 - pull)^j.
    """
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * moved
        moved += velocity
    return moved


def next_control(c_i: Tensors, c: Tensors, moved: Tensors, length: float) -> Tensors:
    """c_i - c + (x - y) / length, with moved = x - y and length = steps times lr: the client's mean gradient.

    A client that took no step has learnt nothing new.
    """
    return c_i - c + moved / length if length else c_i


class Counted:
    """A stream of updates that knows how many went by: |S|, once it is read."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self.updates, self.count = updates, 0

    def __iter__(self) -> Iterator[Update]:
        for update in self.updates:
            self.count += 1
            yield update
