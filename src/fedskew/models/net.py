"""What the nets share: how they are registered, wrapping a user's net, image shapes, dense layers."""

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
    """A registered net.

    make: (input shape, classes, options, layers) -> net.
    options: the dataclass of its options.
    about: the papers it is from or used by; input: the shapes it takes, in words.
    typical, classes: an input shape and a number of classes, for the size that `fedskew models` shows.
    normed: whether it has normalisation layers, so that `norm` can replace them.
    """

    make: Callable[[Shape, int, Any, Layers], Net]
    options: type
    about: str
    input: str
    typical: Shape
    classes: int
    normed: bool = False


def wrap(module: nn.Module, head: str) -> Net:
    """A `Net` from any classifier.

    module: the classifier; it is copied, not changed.
    head: the name of its last layer, such as "fc" or "classifier.3", which must be Linear or begin with a Linear.
        The body is everything before it.

    Parameters that do not require gradients, as of a pretrained body, stay as they are when the net trains.

    >>> net = wrap(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), head="3")
    >>> net.features, net.head
    (5, Linear(in_features=5, out_features=3, bias=True))
    """
    linear = [name for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)]
    known = f"Expected one of its Linear layers: {', '.join(linear) or 'none'}."
    body = copy.deepcopy(module)
    parent, _, last = head.rpartition(".")
    try:
        owner = body.get_submodule(parent)
        layer = owner.get_submodule(last)
    except AttributeError:
        raise UsageError(f"head '{head}' is invalid: the net has no layer '{head}'. {known}") from None
    inner = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    if layer is owner or not inner:
        raise UsageError(f"head '{head}' is invalid: it has no Linear layer. {known}")
    setattr(owner, last, nn.Identity())
    net = Net(body, layer, inner[0].in_features)
    net.head_name = head
    net.fixed = frozenset(name for name, parameter in net.named_parameters() if not parameter.requires_grad)
    return net


def widths(given: Widths) -> tuple[int, ...]:
    """Layer widths from a number, text or a tuple; "" and () are no layers.

    >>> widths(512), widths("384-192"), widths("")
    ((512,), (384, 192), ())
    """
    if isinstance(given, int):
        given = (given,)
    elif isinstance(given, str):
        parts = given.split("-") if given else []
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"'{given}' is invalid: expected widths such as 384-192")
        given = tuple(int(part) for part in parts)
    if any(width < 1 for width in given):
        raise ValueError(f"widths {given} are invalid: expected 1 or more each")
    return given


def dense(sizes: tuple[int, ...], *, last_relu: bool = True) -> nn.Sequential:
    """Linear layers from sizes[0] to sizes[1] to ..., with ReLU between them and, with last_relu, after the last."""
    stack = nn.Sequential()
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        stack.append(nn.Linear(inputs, outputs))
        if last_relu or i < len(sizes) - 2:
            stack.append(nn.ReLU())
    return stack
