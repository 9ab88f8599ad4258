"""A user's own net made faster where that changes nothing but rounding, and safe for images in channels-last memory.

Images reach a net in channels-last memory. A net that flattens with `view` fails on it, so it gets contiguous inputs.
In any `nn.Sequential`, convolution, ReLU and 2x2 max-pool become the layers that our own nets use, and wide
convolutions get channels-last weights. Names of parameters stay the same. The changed net must give the same outputs
as the original on random inputs; otherwise, as where `forward` uses a slice of a Sequential, the original is used.
`step = "plain"` changes no layer: it is the twin that tests compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedskew.core.net import Net, Shape
from fedskew.core.seeding import seeded
from fedskew.models.layers import NARROW, ConvPool, Layers, ReluPool

TOLERANCE = 1e-4  # of outputs, relative to the largest


def own_net(make: Callable[[], Net], shape: Shape, fast: bool) -> Net:
    """The net that `make` builds, ready for samples of `shape`; `fast` False changes none of its layers."""
    net = make()
    if len(shape) != 3 or any(p.is_meta for p in net.parameters()):
        return net
    if fast:
        for channels_last in (True, False):
            if (changed := quickened(net, shape, channels_last)) is not None:
                return changed
    x = probe(shape)
    if outputs_of(net, x) is not None and outputs_of(net, x.to(memory_format=torch.channels_last)) is None:
        net = copy.deepcopy(net)  # a user's module may be used elsewhere, too
        net.body.register_forward_pre_hook(contiguous_input)
    return net


def contiguous_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook that makes inputs contiguous. The view resets strides that one channel leaves ambiguous."""
    return tuple(x.contiguous().view(x.shape) if isinstance(x, Tensor) else x for x in inputs)


def quickened(net: Net, shape: Shape, channels_last: bool) -> Net | None:
    """A faster copy of the net, or None if its outputs are not the same.

    channels_last: wide convolutions get channels-last weights; False: the net gets contiguous inputs instead.
    """
    quick = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):  # a new layer draws initial values, which are not used
        for part in list(quick.modules()):
            if type(part) is nn.Sequential:
                _swap_layers(part)
    if not channels_last:
        quick.body.register_forward_pre_hook(contiguous_input)
    for layer in quick.modules() if channels_last else ():
        if isinstance(layer, nn.Conv2d) and layer.out_channels > NARROW and layer.groups == 1:
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = probe(shape)
    plain, found = outputs_of(net, x), outputs_of(quick, x.to(memory_format=torch.channels_last))
    if plain is None or found is None or plain.shape != found.shape:
        return None
    return quick if (plain - found).abs().max() <= TOLERANCE * plain.abs().max() else None


def probe(shape: Shape) -> Tensor:
    """Two random samples."""
    return torch.randn(2, *shape, generator=seeded(0))


def outputs_of(net: nn.Module, x: Tensor) -> Tensor | None:
    """What the net computes in evaluation mode, with the layers of a training step; None if it fails."""
    modes = [(layer, layer.training) for layer in net.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # a net that draws in evaluation mode, too, draws the same
            made: Tensor = net.eval()(x).detach()
    except Exception:  # the net is the user's: it may raise anything; `check_outputs` reports what it does
        return None
    finally:
        for layer, mode in modes:
            layer.training = mode
    return made


def _swap_layers(stack: nn.Sequential) -> None:
    """Replace (convolution,) ReLU, pool in a Sequential; each replaced layer leaves its place in the numbering."""
    layers = Layers(fast=True)
    for i in range(len(stack) - 1):
        if not (_is_relu(stack[i]) and _is_pool(stack[i + 1])):
            continue
        if i and _is_plain_conv(stack[i - 1]):
            stack[i - 1] = ConvPool.like(cast(nn.Conv2d, stack[i - 1]), layers)
            stack[i], stack[i + 1] = nn.Identity(), nn.Identity()
        else:
            stack[i], stack[i + 1] = nn.Identity(), ReluPool(layers)


def _is_relu(layer: nn.Module) -> bool:
    return type(layer) is nn.ReLU and not _hooked(layer)


def _is_pool(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d or _hooked(layer) or layer.ceil_mode or layer.return_indices:
        return False
    settings = [layer.kernel_size, layer.stride, layer.padding, layer.dilation]
    return [(n, n) if isinstance(n, int) else tuple(n) for n in settings] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _is_plain_conv(layer: nn.Module) -> bool:
    """Whether it is a 5x5 convolution that `ConvPool` can stand for."""
    if type(layer) is not nn.Conv2d or _hooked(layer) or layer.bias is None or isinstance(layer.padding, str):
        return False
    same = (layer.kernel_size, layer.stride, layer.dilation) == ((5, 5), (1, 1), (1, 1))
    return same and layer.groups == 1 and layer.padding_mode == "zeros"


def _hooked(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))
