"""A net as methods see it: a body that computes features and a head that computes logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from fedskew.core.fast.module_index import module_index, set_mode
from fedskew.core.settings import UsageError

Shape = tuple[int, ...]


class Net(nn.Module):
    """A classifier in two parts.

    body: inputs [B, ...] -> features [B, d].
    head: features -> logits [B, C].
    features: d, the number of features.

    >>> import torch
    >>> net = Net(nn.Flatten(), nn.Linear(6, 4), features=6)
    >>> x = torch.zeros(5, 2, 3)
    >>> net.body(x).shape, net(x).shape
    (torch.Size([5, 6]), torch.Size([5, 4]))
    """

    head_name = ""  # of a net that `wrap` made: the name of the head in the user's module
    fixed: frozenset[str] = frozenset()  # likewise: parameters that the user froze, which never train

    def __init__(self, body: nn.Module, head: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x)))


class Seen:
    """A net with the features z of one batch already computed, for losses that take a net: saves a second pass."""

    def __init__(self, net: Net, z: Tensor) -> None:
        self.head, self.z = net.head, z

    def body(self, x: Tensor) -> Tensor:
        """The known features; x is not looked at."""
        return self.z

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.z))


@contextmanager
def still_statistics(net: nn.Module) -> Iterator[None]:
    """While it lasts, batch norm in training mode does not move its running statistics.

    It normalises by the batch as usual. For batches that are unlike what the net is used on, such as virtual images.
    """
    layers = module_index(net).norms
    tracked = [layer.track_running_stats for layer in layers]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer, was in zip(layers, tracked, strict=True):
            layer.track_running_stats = was


def outputs(net: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, *, batch_statistics: bool) -> Tensor:
    """function(x) with `net` in evaluation mode.

    function: the net or a part of it, such as net.body.
    batch_statistics: batch norm uses the statistics of x instead of its running ones, which do not change.
    """
    net.eval()
    layers, n = module_index(net).norms, len(x)
    if layers and n == 1:  # batch statistics need two samples: use the same one twice
        x = x.repeat(2, *[1] * (x.dim() - 1))
    set_mode(layers, batch_statistics)
    with still_statistics(net):
        made = function(x)[:n]
    set_mode(layers, False)
    return made


def image_shape(name: str, shape: Shape, least: int = 1) -> tuple[int, int, int]:
    """The shape as (channels, height, width); raises unless height and width are `least` or more. `name`: the net's."""
    if len(shape) != 3 or min(shape) < 1:
        raise UsageError(
            f"{name} is invalid for shape {shape}: expected images (channels, height, width); mlp takes any shape."
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise UsageError(f"{name} is invalid for images of {height}x{width}: expected at least {least}x{least}.")
    return channels, height, width
