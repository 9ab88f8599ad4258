"""What methods against client drift share: corrected objectives, and gradients estimated from local steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedskew.core.losses import Corrected
from fedskew.core.method import Update
from fedskew.core.site import Loss
from fedskew.core.tensors import Tensors


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
    """A stream of updates that counts them: `count` is |S| once the stream has been read."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self.updates, self.count = updates, 0

    def __iter__(self) -> Iterator[Update]:
        for update in self.updates:
            self.count += 1
            yield update
