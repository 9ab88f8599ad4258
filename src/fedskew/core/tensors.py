"""Named tensors with arithmetic, so that an update rule reads as in its paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors  # in C++, a third of the time of split and view


@dataclass(frozen=True)
class VectorLayout:
    """Names and shapes of tensors that are views of one vector, in order; see `vector_layout`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what follows from it, for reuse

    @cached_property
    def like(self) -> tuple[Tensor, ...]:
        """Tensors of these shapes, without memory."""
        return tuple(torch.empty(shape, device="meta") for shape in self.shapes)


def vector_layout(tensors: Mapping[str, Tensor]) -> VectorLayout:
    """The layout of these tensors, were they views of one vector."""
    if isinstance(tensors, Tensors) and tensors.layout is not None:
        return tensors.layout
    return VectorLayout(tuple(tensors), tuple(t.shape for t in tensors.values()))


class Tensors(dict[str, Tensor]):
    """A dict of tensors, such as a model's parameters, that can be added, subtracted and scaled name by name.

    Operands must have the same names. Results are new; operands are not changed.

    >>> w, update = Tensors(a=torch.tensor([1.0, 2.0])), Tensors(a=torch.tensor([3.0, 3.0]))
    >>> (w - 0.5 * update)["a"].tolist()
    [-0.5, 0.5]

    For speed, tensors may be views of one vector, `flat`; then one operation on it does for all of them, and the views
    are made when an entry is first looked at. Setting or removing an entry gives that up. Results are bit-identical:
    sums, differences, products and quotients are rounded element by element.
    """

    flat: Tensor | None = None  # all entries in order, one after the other; None: they are not views of one vector
    layout: VectorLayout | None = None  # names and shapes of the views; None: there is no vector
    _made = True  # whether the views are in the dict

    @classmethod
    def views(cls, flat: Tensor, like: Mapping[str, Tensor] | VectorLayout) -> Tensors:
        """Views of a vector, with the names and shapes of `like`."""
        made = cls()
        made.flat, made.layout, made._made = (
            flat,
            like if isinstance(like, VectorLayout) else vector_layout(like),
            False,
        )
        return made

    def _make(self) -> None:
        """Put the views into the dict, if they are not there yet."""
        if not self._made:
            self._made = True
            flat, layout = cast(Tensor, self.flat), cast(VectorLayout, self.layout)
            parts = _unflatten_dense_tensors(flat, layout.like)  # type: ignore[no-untyped-call]
            super().update(zip(layout.names, parts, strict=True))

    def _loosen(self) -> None:
        """Entries are about to change: they are no longer views of one vector."""
        self._make()
        self.flat = self.layout = None

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._loosen()
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        self._loosen()
        super().__delitem__(name)

    def pop(self, *arguments: Any) -> Any:
        self._loosen()
        return super().pop(*arguments)

    def popitem(self) -> tuple[str, Tensor]:
        self._loosen()
        return super().popitem()

    def clear(self) -> None:
        self._loosen()
        super().clear()

    def update(self, *arguments: Any, **named: Tensor) -> None:
        self._loosen()
        super().update(*arguments, **named)

    def setdefault(self, name: str, tensor: Tensor) -> Tensor:
        self._loosen()
        return super().setdefault(name, tensor)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return Tensors, (dict(self),)

    def __add__(self, other: Mapping[str, Tensor]) -> Tensors:
        return self._zip(torch.add, other)

    def __sub__(self, other: Mapping[str, Tensor]) -> Tensors:
        return self._zip(torch.sub, other)

    def __mul__(self, factor: float) -> Tensors:
        return self._map(lambda t: t * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Tensors:
        return self._map(lambda t: t / divisor)

    def __or__(self, other: Mapping[str, Tensor]) -> Tensors:  # type: ignore[override]
        """All entries of both; those of `other` where both have a name."""
        vector = isinstance(other, Tensors) and other.flat is not None
        if vector and vector_layout(self).names == vector_layout(other).names:
            return Tensors.views(other.flat, other)  # type: ignore[attr-defined]
        return Tensors({**self, **other})

    def dot(self, other: Mapping[str, Tensor]) -> Tensor:
        """The inner product, summed over all names."""
        return torch.stack([t.sum() for t in self._zip(torch.mul, other).values()]).sum()

    def zeros(self) -> Tensors:
        """Zeros of the same names, shapes and types."""
        return self._map(torch.zeros_like)

    def like(self, names: Iterable[str]) -> Tensors:
        """The entries with these names, in this order."""
        return Tensors({name: self[name] for name in names})

    def split(self, prefixes: str | tuple[str, ...]) -> tuple[Tensors, Tensors]:
        """Two parts: the entries that start with none of `prefixes`, and those that start with one. () matches none."""
        inside = Tensors({n: t for n, t in self.items() if prefixes and n.startswith(prefixes)})
        return Tensors({n: t for n, t in self.items() if n not in inside}), inside

    def _zip(self, op: Callable[[Tensor, Tensor], Tensor], other: Mapping[str, Tensor]) -> Tensors:
        if self.aligned(other):
            return Tensors.views(op(self.flat, other.flat), self)  # type: ignore[arg-type,attr-defined]
        if self.keys() != other.keys():
            raise ValueError(f"tensor names differ: {sorted(self.keys() ^ other.keys())}")
        return Tensors({name: op(t, other[name]) for name, t in self.items()})

    def _map(self, op: Callable[[Tensor], Tensor]) -> Tensors:
        if self.flat is not None:
            return Tensors.views(op(self.flat), self)
        return Tensors({name: op(t) for name, t in self.items()})

    def aligned(self, other: Mapping[str, Tensor]) -> bool:
        """Whether both are views of one vector each, with the same names and shapes in the same order."""
        return self.layout is not None and isinstance(other, Tensors) and self.layout == other.layout


def _made_first(name: str) -> Callable[..., Any]:
    """A method of dict that puts the views into the dict before it looks."""
    method = getattr(dict, name)

    def call(self: Tensors, *arguments: Any) -> Any:
        self._make()
        return method(self, *arguments)

    return call


# `__iter__` is also what makes C code that copies a dict, such as {**tensors}, call these instead of looking itself
for _name in ("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__repr__", "__reversed__",
              "__ror__", "keys", "values", "items", "get", "copy"):  # fmt: skip
    setattr(Tensors, _name, _made_first(_name))


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
        if self._added_at_once(tensors, weight):
            self.total += weight
            return
        if not self.kinds:
            first = tensors if not self.sums else dict.fromkeys(self.sums, torch.empty(0))  # a vector of float32
            self.kinds = {name: t.dtype for name, t in first.items()}
        if self.kinds.keys() != tensors.keys():
            raise ValueError(f"tensor names differ: {sorted(self.kinds.keys() ^ tensors.keys())}")
        self.total += weight
        for name, t in tensors.items():
            if name not in self.sums:
                self.sums[name] = t.to(torch.float64, copy=True).mul_(weight) if t.is_floating_point() else t.clone()
            elif t.is_floating_point():
                self.sums[name].add_(t, alpha=weight)
            else:
                torch.maximum(self.sums[name], t, out=self.sums[name])

    def _added_at_once(self, tensors: Mapping[str, Tensor], weight: float) -> bool:
        """Add a vector instead of many tensors, if that gives the same bits: if every product is exact.

        A product is exact with a whole number below 2^29, as float32 has 24 bits and double 53.
        """
        flat = tensors.flat if isinstance(tensors, Tensors) else None
        if flat is None or flat.dtype != torch.float32 or weight != int(weight) or abs(weight) >= 1 << 29:
            return False
        if not self.sums:
            self.sums = Tensors.views(flat.to(torch.float64).mul_(weight), tensors)
            return True
        if not isinstance(self.sums, Tensors) or not self.sums.aligned(tensors):
            return False
        self.sums.flat.add_(flat, alpha=weight)  # type: ignore[union-attr]
        return True

    def value(self) -> Tensors:
        """The mean of the items so far, in the types of the first."""
        if isinstance(self.sums, Tensors) and self.sums.flat is not None:
            return Tensors.views((self.sums.flat / self.total).to(torch.float32), self.sums)
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
