"""Adam on one vector as six operations: torch.optim.Adam's rule for CPU tensors, in its order, so bits are the same.

What it saves is the bookkeeping around them, two thirds of the step of a small net, and the first second of a process:
torch.optim.Adam imports torch's compiler. The plain twin is torch.optim.Adam, on any other device too.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of torch.optim.Adam


class FlatAdam:
    """Adam's moments of one vector of values, and its steps."""

    def __init__(self, values: Tensor, grads: Tensor, *, lr: float, weight_decay: float = 0.0) -> None:
        """values: what is trained, changed in place; grads: their gradients, read at each step and left as they are."""
        self.values, self.grads, self.lr, self.weight_decay = values, grads, lr, weight_decay
        self.mean, self.square, self.steps = torch.zeros_like(values), torch.zeros_like(values), 0
        self.room = torch.empty_like(values)  # for what a step needs only once

    @torch.no_grad()
    def step(self) -> None:
        """One step. A step's number is a Python float in torch.optim.Adam too, so corrections are rounded alike."""
        self.steps += 1
        (first, second), grad, room = BETAS, self.grads, self.room
        if self.weight_decay:
            grad = torch.add(grad, self.values, alpha=self.weight_decay, out=room)
        self.mean.lerp_(grad, 1 - first)
        self.square.mul_(second).addcmul_(grad, grad, value=1 - second)
        torch.sqrt(self.square, out=room).div_((1 - second**self.steps) ** 0.5).add_(EPSILON)
        self.values.addcdiv_(self.mean, room, value=-(self.lr / (1 - first**self.steps)))
