"""What a net is made of, looked up once: walking a module tree for every client costs more than a small step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Anatomy:
    """Parameters, buffers and layers of a net. A net's tree does not change once it trains."""

    def __init__(self, net: nn.Module) -> None:
        self.parameters = list(net.named_parameters())
        self.buffers = list(net.named_buffers())
        self.layers = list(net.modules())
        self.norms = [layer for layer in self.layers if isinstance(layer, _BatchNorm)]
        self.parts = [(list(part.modules()), list(part.parameters())) for part in net.children()]


def anatomy(net: nn.Module) -> Anatomy:
    known = net.__dict__.get("_anatomy")
    if known is None:
        known = net.__dict__["_anatomy"] = Anatomy(net)
    assert isinstance(known, Anatomy)
    return known


def set_mode(layers: Iterable[nn.Module], training: bool) -> None:
    """`train()` or `eval()` of layers whose list is known, without the walk and the attribute checks."""
    for layer in layers:
        layer.__dict__["training"] = training
