"""Layers that compute the same as torch's, faster on a CPU; and the choice of normalisation.

A layer has the same parameters with fast=True and fast=False, so state dicts are interchangeable.
Fast layers have first derivatives only: for second ones, or torch.func, build the net with fast=False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Norm = Literal["batch", "group", "none"]
aten = torch.ops.aten

NARROW = 16  # output channels up to which a convolution gains nothing from channels_last
FEW = 3  # input channels up to which convolving all four pooling phases at once pays
SMALL = 12  # samples up to which torch's native convolution beats oneDNN's 40 us per call


@dataclass(frozen=True)
class Layers:
    """How to make a net's layers. `kind`: which normalisation; `fast`: faster layers, or torch's own."""

    kind: Norm = "batch"
    fast: bool = True

    @property
    def bias(self) -> bool:
        """Whether a convolution before a norm has a bias: only without a norm, which has its own."""
        return self.kind == "none"

    def norm(self, channels: int, *, track: bool = True, momentum: float = 0.1) -> nn.Module:
        """A normalisation layer. `track`, `momentum`: of batch norm's running statistics."""
        if self.kind == "batch":
            return BatchNorm(channels, momentum=momentum, track_running_stats=track)
        # Two groups, as Reddi et al. (2021) for federated ResNets; they divide every width used here.
        return nn.GroupNorm(2, channels) if self.kind == "group" else nn.Identity()


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that uses its running statistics where torch raises an error: one value per channel."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.running_mean is not None and x.shape[1] == x.numel():
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)


class ReluPool(nn.Module):
    """ReLU, then 2x2 max-pool. Fast: pool first, then ReLU on a quarter of the values; the result is the same."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.fast = layers.fast

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(max_pool(x)) if self.fast else F.max_pool2d(F.relu(x), 2)


class ConvPool(nn.Conv2d):
    """5x5 convolution, ReLU, 2x2 max-pool, in the way that is fastest for its size."""

    def __init__(self, inputs: int, outputs: int, padding: int, layers: Layers) -> None:
        super().__init__(inputs, outputs, 5, padding=padding)
        self.fast = layers.fast
        self.narrow = outputs <= NARROW

    @classmethod
    def like(cls, conv: nn.Conv2d, layers: Layers) -> ConvPool:
        """A layer with the parameters of a 5x5 convolution, which is not to be used any more."""
        made = cls(conv.in_channels, conv.out_channels, cast(int, conv.padding), layers)
        made.weight, made.bias, made.training = conv.weight, conv.bias, conv.training
        return made

    def _phased(self, samples: int) -> bool:
        """Whether convolving all four pooling phases at once is fastest for so many samples."""
        return self.in_channels == 1 or (self.in_channels <= FEW and samples > SMALL // self.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fast:
            return F.max_pool2d(F.relu(super().forward(x)), 2)
        if not self.narrow or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.relu(max_pool(super().forward(x)))
        x = x.contiguous().view(x.shape)  # one channel in channels_last counts as contiguous; the view resets strides
        weight = self.weight.contiguous()
        if self._phased(x.shape[0]):
            return cast(Tensor, _PhasedConvPool.apply(x, weight, self.bias, self.padding))  # type: ignore[no-untyped-call]
        if x.shape[0] <= SMALL:
            y = aten.thnn_conv2d(x, weight, self.kernel_size, self.bias, self.stride, self.padding)
        else:
            y = F.conv2d(x, weight, self.bias, self.stride, self.padding)
        return F.relu(F.max_pool2d(y, 2))

    def forward_by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        """`forward` without autograd, see fedskew.core.fast.by_hand."""
        weight = self.weight
        if self.narrow:
            x, weight = x.contiguous().view(x.shape), weight.contiguous()
            if self._phased(x.shape[0]):
                pooled, saved = _phased_forward(x, weight, cast(Tensor, self.bias), self.padding)
                return pooled, ("phased", saved)
        if self.narrow and x.shape[0] <= SMALL:
            kind = "native"
            y = aten._slow_conv2d_forward(x, weight, self.kernel_size, self.bias, self.stride, self.padding)
        else:
            kind = "general"
            y = torch.conv2d(x, weight, self.bias, self.stride, self.padding)
        pooled, index = aten.max_pool2d_with_indices(y, [2, 2])
        return pooled.relu_(), (kind, (x, weight, y, index, pooled))

    def backward_by_hand(self, saved: Any, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        """The derivative of `forward_by_hand`."""
        kind, kept = saved
        wanted = [wants_input, True, True]
        if kind == "phased":
            grads = _phased_backward(kept, grad, self.padding, wanted)
        else:
            x, weight, y, index, pooled = kept
            grad = _where_positive(grad, pooled)
            grad = aten.max_pool2d_with_indices_backward(grad, y, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
            if kind == "native":
                grads = aten._slow_conv2d_backward.output_mask(
                    grad, x, weight, self.kernel_size, self.stride, self.padding, wanted
                )
            else:
                grads = aten.convolution_backward(
                    grad, x, weight, [self.out_channels], self.stride, self.padding, [1, 1], False, [0, 0], 1, wanted
                )
        for parameter, values in zip((self.weight, self.bias), grads[1:], strict=True):
            cast(Tensor, cast(Tensor, parameter).grad).copy_(cast(Tensor, values))
        return cast(Tensor, grads[0]) if wants_input else None


def channels_last(net: nn.Module) -> None:
    """Put the weights of convolutions that are faster in channels_last memory format into it."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d) and not (isinstance(layer, ConvPool) and layer.narrow):
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def max_pool(x: Tensor) -> Tensor:
    """2x2 max-pool. Without gradients it is the maximum of strided halves, which is vectorised, unlike torch's."""
    if torch.is_grad_enabled():
        return F.max_pool2d(x, 2)
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class _PhasedConvPool(torch.autograd.Function):
    """k x k convolution, 2x2 max-pool, ReLU, see `_phased_forward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        pooled, saved = _phased_forward(x, weight, bias, padding)
        ctx.save_for_backward(*saved)
        ctx.padding = padding
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_phased_backward(ctx.saved_tensors, grad, ctx.padding, ctx.needs_input_grad[:3]), None


def _phased_forward(x: Tensor, weight: Tensor, bias: Tensor, padding: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """k x k convolution, 2x2 max-pool, ReLU; returns the output and what `_phased_backward` needs.

    The four positions that a pool compares are four convolutions of stride 2 with the same kernel, moved by (0 or 1,
    0 or 1) inside (k + 1) x (k + 1). One convolution computes them as channels [2, 2, outputs], and pooling compares
    whole blocks of memory instead of neighbours. The gradient of a tie goes to the first position, as in torch.
    """
    outputs, inputs, k, _ = weight.shape
    kernels = weight.new_zeros(2, 2, outputs, inputs, k + 1, k + 1)
    _moved(kernels).copy_(weight)
    kernels = kernels.view(4 * outputs, inputs, k + 1, k + 1)
    columns = None
    if inputs == 1:
        columns, size = _columns(x, k + 1, padding)
        y = torch.bmm(kernels.view(1, 4 * outputs, -1).expand(x.shape[0], -1, -1), columns)
    else:
        y = torch.conv2d(x, kernels, None, 2, padding)
        size = y.shape[2:]
    y = y.view(x.shape[0], 2, 2, outputs, *size)
    left, right = y.unbind(2)
    top, bottom = torch.maximum(left, right).unbind(1)
    pooled = torch.maximum(top, bottom).add_(bias[:, None, None]).relu_()
    return pooled, (x, kernels, columns, right - left, bottom - top, pooled)


def _columns(x: Tensor, k: int, padding: Any) -> tuple[Tensor, Sequence[int]]:
    """What a k x k kernel sees of one-channel images, in steps of 2: [samples, k * k, positions], height and width.

    A product with these columns takes a third of the time of oneDNN's weight gradient for one input channel.
    """
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    where, size = _column_index(x.shape[2], x.shape[3], k)
    return x.flatten(1).index_select(1, where.to(x.device)).view(x.shape[0], k * k, -1), size


@lru_cache(maxsize=32)
def _column_index(height: int, width: int, k: int) -> tuple[Tensor, tuple[int, int]]:
    """For `_columns`: positions in the image of [k * k, positions] values, and height and width of the result."""
    pixels = torch.arange(height * width).view(height, width)
    windows = pixels.unfold(0, k, 2).unfold(1, k, 2)  # [rows, columns, k, k]
    return windows.permute(2, 3, 0, 1).flatten(), (windows.shape[0], windows.shape[1])


def _phased_backward(saved: Any, grad: Tensor, padding: Any, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias, None where not wanted."""
    x, kernels, columns, right_wins, bottom_wins, pooled = saved
    grad = _where_positive(grad.contiguous(), pooled)
    grad_bias = grad.sum((0, 2, 3)) if wanted[2] else None
    grad_y = _route(_route(grad, bottom_wins, 1), right_wins, 2).flatten(1, 3)
    by_product = columns is not None
    grad_x = grad_kernels = grad_weight = None
    mask = [wanted[0], wanted[1] and not by_product, False]
    if any(mask):
        grad_x, grad_kernels, _ = aten.convolution_backward(
            grad_y, x, kernels, None, [2, 2], padding, [1, 1], False, [0, 0], 1, mask
        )
    if by_product and wanted[1]:
        grad_kernels = torch.bmm(grad_y.flatten(2), columns.transpose(1, 2)).sum(0)
    if grad_kernels is not None:
        grad_weight = _moved(grad_kernels.view(2, 2, -1, *kernels.shape[1:])).sum((0, 1))
    return grad_x, grad_weight, grad_bias


def _moved(kernels: Tensor) -> Tensor:
    """View [2, 2, O, C, k, k] of kernels [2, 2, O, C, k + 1, k + 1]: in [i, j] the k x k part that starts at (i, j)."""
    *outer, height, width = kernels.shape
    i, j, *rest = kernels.stride()
    return kernels.as_strided((*outer, height - 1, width - 1), (i + rest[-2], j + rest[-1], *rest))


def _where_positive(grad: Tensor, x: Tensor) -> Tensor:
    """grad where x > 0, else 0; vectorised, unlike a product with a mask."""
    return cast(Tensor, aten.threshold_backward(grad, x, 0))


def _route(grad: Tensor, second_wins: Tensor, dim: int) -> Tensor:
    """The gradient of maximum(first, second) for both, stacked in `dim`; second_wins = second - first."""
    second = _where_positive(grad, second_wins)
    return torch.stack((grad - second, second), dim)
