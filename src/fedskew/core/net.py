"""A net as methods see it: a body that makes features and a head that makes logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from fedskew.core.fast.module_index import module_index
from fedskew.core.settings import UsageError

Shape = tuple[int, ...]


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


def outputs(net: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, *, batch_statistics: bool) -> Tensor:
    """`function` of a batch with `net`, of which it is made, in evaluation mode. `batch_statistics` as in `score`."""
    net.eval()
    layers, n = module_index(net).norms, len(x)
    tracked = [layer.track_running_stats for layer in layers]
    if batch_statistics:
        for layer in layers:  # train mode that records nothing
            layer.train().track_running_stats = False
    if layers and n == 1:  # batch statistics need two: the same sample twice
        x = x.repeat(2, *[1] * (x.dim() - 1))
    made = function(x)[:n]
    for layer, was in zip(layers, tracked, strict=True):
        layer.eval().track_running_stats = was
    return made


def image(name: str, shape: Shape, least: int = 1) -> tuple[int, int, int]:
    """The shape as (channels, height, width), both sides at least `least`."""
    if len(shape) != 3 or min(shape) < 1:
        raise UsageError(f"{name} takes images (channels, height, width), got shape {shape}; mlp takes any shape.")
    channels, height, width = shape
    if min(height, width) < least:
        raise UsageError(f"{name} needs images of at least {least}x{least}, got {height}x{width}.")
    return channels, height, width
