"""A net's parameters, buffers and layers, listed once: walking the tree for every client costs more than a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.core.tensors import vector_layout


class ModuleIndex:
    """Parameters, buffers and layers of a net. It assumes that the module tree does not change once the net trains."""

    def __init__(self, net: nn.Module) -> None:
        self.parameters = list(net.named_parameters())
        self.layout = vector_layout({name: p.detach() for name, p in self.parameters})
        self.buffers = list(net.named_buffers())
        self.layers = list(net.modules())
        self.norms = [layer for layer in self.layers if isinstance(layer, _BatchNorm)]
        self.parts = [(list(part.modules()), list(part.parameters())) for part in net.children()]


def module_index(net: nn.Module) -> ModuleIndex:
    """The net's index, made on first use and kept with the net."""
    known = net.__dict__.get("_module_index")
    if known is None:
        known = net.__dict__["_module_index"] = ModuleIndex(net)
    assert isinstance(known, ModuleIndex)
    return known


def set_mode(layers: Iterable[nn.Module], training: bool) -> None:
    """`train()` or `eval()` of a list of layers, without walking the tree again."""
    for layer in layers:
        layer.__dict__["training"] = training
