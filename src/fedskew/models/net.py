"""The shape of every net: a body that makes features and a head that makes logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta
from torch import nn

from fedskew.core.net import Net, Shape
from fedskew.core.settings import UsageError
from fedskew.models.layers import Layers

Count = Annotated[int, Meta(ge=1)]
Widths = int | str | tuple[int, ...]  # 512, "384-192" (a comma would end the option) or (384, 192)


@dataclass(frozen=True)
class Kind:
    """A registered net: how it is made, and what `fedskew models` says of it."""

    make: Callable[[Shape, int, Any, Layers], Net]
    options: type
    about: str
    input: str
    typical: Shape
    classes: int
    normed: bool = False


def wrap(module: nn.Module, head: str) -> Net:
    """Any classifier by the name of its last layer ("fc", "classifier.3"); the module itself is left as it is."""
    linear = [name for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)]
    known = f"Linear layers: {', '.join(linear) or 'none'}."
    body = copy.deepcopy(module)
    parent, _, last = head.rpartition(".")
    try:
        owner = body.get_submodule(parent)
        layer = owner.get_submodule(last)
    except AttributeError:
        raise UsageError(f"the net has no layer '{head}'. {known}") from None
    inner = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    if layer is owner or not inner:
        raise UsageError(f"layer '{head}' cannot be a head: it must be Linear or start with one. {known}")
    setattr(owner, last, nn.Identity())
    return Net(body, layer, inner[0].in_features)


def widths(given: Widths) -> tuple[int, ...]:
    """Layer widths from 512, "384-192", "" or (384, 192)."""
    if isinstance(given, int):
        given = (given,)
    elif isinstance(given, str):
        parts = given.split("-") if given else []
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"'{given}' is not a list of widths such as 384-192")
        given = tuple(int(part) for part in parts)
    if any(width < 1 for width in given):
        raise ValueError(f"widths must be positive, got {given}")
    return given


def dense(sizes: tuple[int, ...], *, last_relu: bool = True) -> nn.Sequential:
    """Linear layers through `sizes`, ReLU between and, if asked, after the last."""
    stack = nn.Sequential()
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        stack.append(nn.Linear(inputs, outputs))
        if last_relu or i < len(sizes) - 2:
            stack.append(nn.ReLU())
    return stack
