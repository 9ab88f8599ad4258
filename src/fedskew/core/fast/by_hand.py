"""A training step without autograd, for a net that is a chain of layers whose derivatives are written out here.

It calls the kernels that autograd would call, in the same order, so gradients are bit-identical; what it saves is the
recording of every operation, which takes a third of the step of a small net. Any other net goes through autograd, the
plain twin, and so does any loss but cross entropy and functions of the logits, which autograd differentiates alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

aten = torch.ops.aten
Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (logits, y) -> a loss and its gradient by the logits


@runtime_checkable
class ByHand(Protocol):
    """A layer with its derivative written out. Both methods are called without autograd, in training mode."""

    def forward_by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        """(output, what the other method needs)."""
        ...

    def backward_by_hand(self, saved: Any, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        """Write the gradients of the layer's parameters to their `grad`; returns the input's, None if not wanted."""
        ...


class Chain:
    """The layers of a net, one after the other."""

    def __init__(self, layers: list[ByHand]) -> None:
        self.layers = layers

    def gradient(self, x: Tensor, y: Tensor, slope: Slope) -> float:
        """Write the gradient of a loss, of which `slope` is the part beyond the logits, to `grad` of all parameters.

        Returns the loss.
        """
        saved = []
        for layer in self.layers:
            x, kept = layer.forward_by_hand(x)
            saved.append(kept)
        grad: Any  # a tensor, but for the first layer, whose input needs none
        loss, grad = slope(x, y)
        for i in range(len(saved) - 1, -1, -1):
            grad = self.layers[i].backward_by_hand(saved[i], grad, wants_input=i > 0)
        return float(loss)


_ONE = torch.ones(())


def cross_entropy_slope(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross entropy, and its gradient."""
    log_p = aten._log_softmax(logits, 1, False)
    loss, count = aten.nll_loss_forward(log_p, y, None, 1, -100)
    grad = aten.nll_loss_backward(_ONE, log_p, y, None, 1, -100, count)
    return loss, aten._log_softmax_backward_data(grad, log_p, 1, log_p.dtype)


def imitation_slope(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """`imitation` at temperature 1 of the student's logits, and its gradient."""
    log_p, q = aten._log_softmax(student, 1, False), teacher.softmax(1)
    loss = nn.functional.kl_div(log_p, q, reduction="batchmean")
    return loss, aten._log_softmax_backward_data(q * -(_ONE / len(q)), log_p, 1, log_p.dtype)


def slope_by_autograd(of_logits: Callable[[Tensor, Tensor], Tensor]) -> Slope:
    """The slope of a loss that is a function of (logits, y)."""

    @torch.enable_grad()
    def slope(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = of_logits(leaf, y)
        (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    return slope


class _Linear:
    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight, layer.bias

    def forward_by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        return nn.functional.linear(x, self.weight, self.bias), x

    def backward_by_hand(self, saved: Any, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        grad_input = grad.mm(self.weight) if wants_input else None
        torch.mm(grad.t(), saved, out=self.weight.grad)
        torch.sum(grad, 0, out=self.bias.grad)
        return grad_input


class _ReLU:
    def forward_by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        x = x.relu()
        return x, x

    def backward_by_hand(self, saved: Any, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        return aten.threshold_backward(grad, saved, 0) if wants_input else None


class _Flatten:
    def forward_by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        return x.flatten(1), x.shape

    def backward_by_hand(self, saved: Any, grad: Tensor, *, wants_input: bool) -> Tensor | None:
        return grad.view(saved) if wants_input else None


def chain_of(net: nn.Module, *parts: nn.Module) -> Chain | None:
    """The net as a chain, if it applies `parts` one after the other; made on first use and kept with the net.

    None if one of the layers is not known here, or has hooks.
    """
    if "_chain" not in net.__dict__:
        found = [_by_hand(layer) for part in parts for layer in _flattened(part)]
        known = [layer for layer in found if layer is not None]
        usable = len(known) == len(found) and not any(_hooked(layer) for layer in net.modules())
        net.__dict__["_chain"] = Chain(known) if usable else None
    chain = net.__dict__["_chain"]
    assert chain is None or isinstance(chain, Chain)
    return chain


def _flattened(layer: nn.Module) -> list[nn.Module]:
    """The layers of nested Sequentials in order; Identity is none."""
    if type(layer) is nn.Identity:
        return []
    return [part for child in layer for part in _flattened(child)] if type(layer) is nn.Sequential else [layer]


def _by_hand(layer: nn.Module) -> ByHand | None:
    if type(layer) is nn.Linear and layer.bias is not None:
        return _Linear(layer)
    if type(layer) is nn.ReLU:
        return _ReLU()
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return _Flatten()
    return layer if isinstance(layer, ByHand) and getattr(layer, "fast", True) else None


def _hooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or any(p._backward_hooks for p in layer.parameters(recurse=False))
