"""Many small steps of one linear layer on fixed features: `fit` of that layer with plain SGD, in fewer calls.

It calls the kernels that matter in `fit`'s order, so the result is bit-identical. It saves what depends on the batches
alone (the derivative of the mean with respect to log p, made once for a pass), the loss, and new tensors at each step
and pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedskew.core.fast.flat import flat_of
from fedskew.core.samples import Data


def is_linear(net: Any) -> bool:
    """Whether a net is one linear layer with a bias, its head, and nothing else."""
    return type(net.body) is nn.Identity and type(net.head) is nn.Linear and net.head.bias is not None


@torch.inference_mode()
def descend(net: Any, data: Data, rng: torch.Generator, *, epochs: int, lr: float, batch: int) -> None:
    """Train a net that `is_linear` on features with cross entropy, as `fit` does with SGD; `rng` draws the batches."""
    layer, flat, samples = net.head, flat_of(net), len(data)
    weight, bias, values, grads = layer.weight.data, layer.bias.data, flat.values, flat.grads
    weight_grad, bias_grad, weight_t = layer.weight.grad, layer.bias.grad, weight.t()
    torch.randint(1 << 62, (), generator=rng)  # `fit` draws one for dropout
    features, y = data.take(torch.arange(samples))
    sizes = [batch] * (samples // batch) + [samples % batch] * (samples % batch > 0)
    of_mean = torch.cat([torch.full((size, 1), -1.0 / size) for size in sizes])
    hot = nn.functional.one_hot(y, len(weight)).float()
    shuffled, starts = torch.empty_like(features), torch.empty_like(hot)  # filled anew in each pass; batches are views
    places = {size: torch.empty(3, size, len(weight)).unbind() for size in set(sizes)}
    at = [(*places[size], places[size][2].t()) for size in sizes]
    batches = list(zip(torch.split(shuffled, batch), torch.split(starts, batch), at, strict=True))
    for _ in range(epochs):
        order = torch.randperm(samples, generator=rng)
        torch.index_select(features, 0, order, out=shuffled)
        torch.index_select(hot, 0, order, out=starts).mul_(of_mean)
        for x, start, (logits, log_p, error, error_t) in batches:
            torch.addmm(bias, x, weight_t, out=logits)
            torch._log_softmax(logits, 1, False, out=log_p)
            torch._log_softmax_backward_data(start, log_p, 1, torch.float32, out=error)
            torch.mm(error_t, x, out=weight_grad)
            torch.sum(error, 0, out=bias_grad)
            values.add_(grads, alpha=-lr)
