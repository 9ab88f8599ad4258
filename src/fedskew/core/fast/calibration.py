"""The derivative of a calibrated ensemble's cross entropy, written out: what `calibrate` of FEDIC and FedDDC descends.

It calls the kernels that autograd would call, in the same order, so gradients are bit-identical. The plain twin is
autograd on the loss as the method writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedskew.core.fast.adam import FlatAdam

aten = torch.ops.aten
ALIGNED = 16  # numbers: where a tensor starts in memory decides how some kernels sum, and torch's own start at 64 bytes


class Frozen(NamedTuple):
    """What does not change during a calibration, one row per sample."""

    z: Tensor  # logits [n, C]; or [n, S, C] of S clients, which s and s_0 weight sample by sample
    z_cr: Tensor  # logits [n, C]
    features: Tensor  # [n, d], which v and v_0 (if it is there) turn into the gate
    y: Tensor  # labels [n]


class Vector:
    """Named tensors as views of one vector, each where torch could have put it, and their gradients likewise."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.places, end = dict[str, tuple[int, torch.Size]](), 0
        for name, t in values.items():
            self.places[name] = end, t.shape
            end += -(-t.numel() // ALIGNED) * ALIGNED
        self.values, self.grads = torch.zeros(end), torch.zeros(end)
        self.named, self.named_grads = self.views(self.values), self.views(self.grads)
        self.copy(self.values, values)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors that lie in a vector of this length."""
        return {name: vector[at : at + shape.numel()].view(shape) for name, (at, shape) in self.places.items()}

    def copy(self, vector: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write tensors by name to their places in a vector of this length."""
        for name, view in self.views(vector).items():
            view.copy_(values[name])


@torch.inference_mode()
def gradient(c: Mapping[str, Tensor], grads: Mapping[str, Tensor], frozen: Frozen, row: Tensor) -> None:
    """Write to `grads` the gradient of the mean cross entropy of the samples `row` with respect to c.

    The logits are q (a z + b) + (1 - q) z_cr with q = sigmoid(features . v + v_0).
    """
    z, z_cr, features, y = (t.index_select(0, row) for t in frozen)
    back = None
    if z.dim() == 3:
        z, back = _weighted(c, grads, z)
    gate = features.mv(c["v"])
    q = (gate + c["v_0"] if "v_0" in c else gate).sigmoid().unsqueeze(1)
    own, rest = c["a"] * z + c["b"], 1 - q
    log_p = torch._log_softmax(q * own + rest * z_cr, 1, False)
    _, count = aten.nll_loss_forward(log_p, y, None, 1, -100)
    grad = aten.nll_loss_backward(_ONE, log_p, y, None, 1, -100, count)
    grad = torch._log_softmax_backward_data(grad, log_p, 1, log_p.dtype)
    grad_q = (grad * z_cr).sum(1, keepdim=True).neg_().add_((grad * own).sum(1, keepdim=True))
    grad = grad * q
    torch.sum(grad, 0, out=grads["b"])
    torch.sum(grad * z, 0, out=grads["a"])
    grad_gate = aten.sigmoid_backward(grad_q, q).squeeze(1)
    if "v_0" in c:
        torch.sum(grad_gate, 0, keepdim=True, out=grads["v_0"])
    torch.mv(features.t(), grad_gate, out=grads["v"])
    if back is not None:
        back(grad * c["a"])


_ONE = torch.ones(())


def _weighted(
    c: Mapping[str, Tensor], grads: Mapping[str, Tensor], logits: Tensor
) -> tuple[Tensor, Callable[[Tensor], None]]:
    """z [n, C] of the clients' logits [n, S, C], and what writes the gradients of s and s_0 given that of z."""
    n, clients, classes = logits.shape
    rows = logits.view(n * clients, classes)
    sure = rows.mv(c["s"]).view(n, clients) + c["s_0"]
    log_e, kept = aten.log_sigmoid_forward(sure)
    e = torch._softmax(log_e, 1, False)

    def back(grad: Tensor) -> None:
        grad_e = grad.unsqueeze(1).bmm(logits.transpose(1, 2)).squeeze(1)
        grad_sure = aten.log_sigmoid_backward(torch._softmax_backward_data(grad_e, e, 1, e.dtype), sure, kept)
        torch.sum(grad_sure, (0, 1), keepdim=True, out=grads["s_0"].view(1, 1))
        torch.mv(rows.t(), grad_sure.view(-1), out=grads["s"])

    return e.unsqueeze(1).bmm(logits).squeeze(1), back


class Descent:
    """Adam on the tensors of a calibration with `gradient`, continuing from moments of earlier rounds."""

    def __init__(self, values: Mapping[str, Tensor], moments: Mapping[str, Tensor], lr: float) -> None:
        """moments: `name.mean` and `name.square` of each tensor, and `step`, how many were done."""
        self.vector = Vector(values)
        self.adam = FlatAdam(self.vector.values, self.vector.grads, lr=lr)
        self.adam.steps = int(moments["step"])
        self.vector.copy(self.adam.mean, {name: moments[f"{name}.mean"] for name in values})
        self.vector.copy(self.adam.square, {name: moments[f"{name}.square"] for name in values})

    def step(self, frozen: Frozen, row: Tensor) -> None:
        """One step on the samples `row`."""
        gradient(self.vector.named, self.vector.named_grads, frozen, row)
        self.adam.step()

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of (values, moments) as they are now."""
        values = {name: t.clone() for name, t in self.vector.named.items()}
        mean, square = self.vector.views(self.adam.mean), self.vector.views(self.adam.square)
        moments = {f"{name}.mean": t.clone() for name, t in mean.items()}
        moments |= {f"{name}.square": t.clone() for name, t in square.items()}
        return values, moments | {"step": torch.tensor(float(self.adam.steps))}
