"""The shape of every net: a body that makes features and a head that makes logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, cast

from msgspec import Meta
from torch import Tensor, nn

from fedskew.models.layers import Layers
from fedskew.settings import Mistake

Shape = tuple[int, ...]
Count = Annotated[int, Meta(ge=1)]
Widths = int | str | tuple[int, ...]  # 512, "384-192" (a comma would end the option) or (384, 192)


class Net(nn.Module):
    """A classifier cut in two: `body` makes features [B, d], `head` makes logits [B, C]."""

    def __init__(self, body: nn.Module, head: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x)))


class Seen:
    """A net on a batch whose features are known: a loss may take it for the net, without a second pass."""

    def __init__(self, net: Net, z: Tensor) -> None:
        self.head, self.z = net.head, z

    def body(self, x: Tensor) -> Tensor:
        return self.z

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.z))


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
        raise Mistake(f"the net has no layer '{head}'. {known}") from None
    inner = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    if layer is owner or not inner:
        raise Mistake(f"layer '{head}' cannot be a head: it must be Linear or start with one. {known}")
    setattr(owner, last, nn.Identity())
    return Net(body, layer, inner[0].in_features)


def image(name: str, shape: Shape, least: int = 1) -> tuple[int, int, int]:
    """The shape as (channels, height, width), both sides at least `least`."""
    if len(shape) != 3 or min(shape) < 1:
        raise Mistake(f"{name} takes images (channels, height, width), got shape {shape}; mlp takes any shape.")
    channels, height, width = shape
    if min(height, width) < least:
        raise Mistake(f"{name} needs images of at least {least}x{least}, got {height}x{width}.")
    return channels, height, width


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
