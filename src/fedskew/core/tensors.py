"""Named tensors with arithmetic, so that an update rule reads as it does in the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class Tensors(dict[str, Tensor]):
    """Tensors by name that can be added, subtracted and scaled. Names must match exactly."""

    def __add__(self, other: Mapping[str, Tensor]) -> Tensors:
        return self._zip(torch.add, other)

    def __sub__(self, other: Mapping[str, Tensor]) -> Tensors:
        return self._zip(torch.sub, other)

    def __mul__(self, factor: float) -> Tensors:
        return Tensors({name: t * factor for name, t in self.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Tensors:
        return Tensors({name: t / divisor for name, t in self.items()})

    def __or__(self, other: Mapping[str, Tensor]) -> Tensors:  # type: ignore[override]
        """Overlay: `other` wins where both have a name."""
        return Tensors({**self, **other})

    def dot(self, other: Mapping[str, Tensor]) -> Tensor:
        """The inner product over all names."""
        return torch.stack([t.sum() for t in self._zip(torch.mul, other).values()]).sum()

    def zeros(self) -> Tensors:
        return Tensors({name: torch.zeros_like(t) for name, t in self.items()})

    def like(self, names: Iterable[str]) -> Tensors:
        """The entries named in `names`."""
        return Tensors({name: self[name] for name in names})

    def split(self, prefixes: str | tuple[str, ...]) -> tuple[Tensors, Tensors]:
        """Entries whose names do not, and do, start with one of `prefixes`."""
        inside = Tensors({n: t for n, t in self.items() if prefixes and n.startswith(prefixes)})
        return Tensors({n: t for n, t in self.items() if n not in inside}), inside

    def _zip(self, op: Callable[[Tensor, Tensor], Tensor], other: Mapping[str, Tensor]) -> Tensors:
        if self.keys() != other.keys():
            raise ValueError(f"tensor names differ: {sorted(self.keys() ^ other.keys())}")
        return Tensors({name: op(t, other[name]) for name, t in self.items()})


class Mean:
    """A weighted mean of a stream: memory does not grow with the number of items.

    Sums are kept in double precision. Integer tensors (batch-norm counters) have no meaningful
    mean: the largest is kept.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.sums: dict[str, Tensor] = {}
        self.kinds: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        if not self.kinds:
            self.kinds = {name: t.dtype for name, t in tensors.items()}
        elif self.kinds.keys() != tensors.keys():
            raise ValueError(f"tensor names differ: {sorted(self.kinds.keys() ^ tensors.keys())}")
        self.total += weight
        for name, t in tensors.items():
            if name not in self.sums:
                self.sums[name] = t.to(torch.float64, copy=True).mul_(weight) if t.is_floating_point() else t.clone()
            elif t.is_floating_point():
                self.sums[name].add_(t, alpha=weight)
            else:
                torch.maximum(self.sums[name], t, out=self.sums[name])

    def value(self) -> Tensors:
        return Tensors(
            {
                name: (s / self.total).to(self.kinds[name]) if self.kinds[name].is_floating_point else s.clone()
                for name, s in self.sums.items()
            }
        )


def weighted_mean(items: Iterable[tuple[Mapping[str, Tensor], float]]) -> Tensors:
    mean = Mean()
    for tensors, weight in items:
        mean.add(tensors, weight)
    return mean.value()


Payload = dict[str, Tensors]  # group -> name -> tensor; the only thing sent, kept or saved
