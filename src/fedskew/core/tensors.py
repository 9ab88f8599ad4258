"""Named tensors with arithmetic, so that an update rule reads as in its paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class Tensors(dict[str, Tensor]):
    """A dict of tensors, such as a model's parameters, that can be added, subtracted and scaled name by name.

    Operands must have the same names. Results are new; operands are not changed.

    >>> w, update = Tensors(a=torch.tensor([1.0, 2.0])), Tensors(a=torch.tensor([3.0, 3.0]))
    >>> (w - 0.5 * update)["a"].tolist()
    [-0.5, 0.5]
    """

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
        """All entries of both; those of `other` where both have a name."""
        return Tensors({**self, **other})

    def dot(self, other: Mapping[str, Tensor]) -> Tensor:
        """The inner product, summed over all names."""
        return torch.stack([t.sum() for t in self._zip(torch.mul, other).values()]).sum()

    def zeros(self) -> Tensors:
        """Zeros of the same names, shapes and types."""
        return Tensors({name: torch.zeros_like(t) for name, t in self.items()})

    def like(self, names: Iterable[str]) -> Tensors:
        """The entries with these names, in this order."""
        return Tensors({name: self[name] for name in names})

    def split(self, prefixes: str | tuple[str, ...]) -> tuple[Tensors, Tensors]:
        """Two parts: the entries that start with none of `prefixes`, and those that start with one. () matches none."""
        inside = Tensors({n: t for n, t in self.items() if prefixes and n.startswith(prefixes)})
        return Tensors({n: t for n, t in self.items() if n not in inside}), inside

    def _zip(self, op: Callable[[Tensor, Tensor], Tensor], other: Mapping[str, Tensor]) -> Tensors:
        if self.keys() != other.keys():
            raise ValueError(f"tensor names differ: {sorted(self.keys() ^ other.keys())}")
        return Tensors({name: op(t, other[name]) for name, t in self.items()})


class Mean:
    """A running weighted mean of named tensors: memory does not grow with the number of items.

    Sums are in double precision. Of integer tensors (batch norm's counters) the result is the largest, not a mean.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.sums: dict[str, Tensor] = {}
        self.kinds: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Count in one item. All items must have the same names; weights need not sum to one."""
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
        """The mean of the items so far, in the types of the first."""
        return Tensors(
            {
                name: (s / self.total).to(self.kinds[name]) if self.kinds[name].is_floating_point else s.clone()
                for name, s in self.sums.items()
            }
        )


def weighted_mean(items: Iterable[tuple[Mapping[str, Tensor], float]]) -> Tensors:
    """The mean of (tensors, weight) pairs; see `Mean`."""
    mean = Mean()
    for tensors, weight in items:
        mean.add(tensors, weight)
    return mean.value()


Payload = dict[str, Tensors]  # group -> name -> tensor; what is sent, stored and saved
