"""A net's parameters as one buffer: an optimiser step is a few large operations instead of many small ones.

Each parameter becomes a view of one flat tensor, its gradient a view of another. A view keeps the parameter's own
strides, so channels-last weights stay channels-last. `PlainDescent` is the plain twin that the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedskew.core.fast.adam import FlatAdam
from fedskew.core.fast.module_index import module_index
from fedskew.core.losses import Corrected
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training


class Flat:
    """Values and gradients of all of a net's parameters, in the order of `named_parameters`."""

    def __init__(self, net: nn.Module) -> None:
        parameters = [p for _, p in module_index(net).parameters]
        like = parameters[0].detach() if parameters else torch.empty(0)
        self.values = like.new_empty(sum(p.numel() for p in parameters))
        self.grads = torch.zeros_like(self.values)
        self.plain = all(p.data.is_contiguous() for p in parameters)  # whether entries lie as in `Tensors.flat`
        self.known: dict[tuple[bool, ...], list[tuple[Tensor, Tensor]]] = {}  # `runs` by which parameters train
        start = 0
        for p in parameters:
            old = p.data if p.data.is_contiguous(memory_format=torch.channels_last) else p.data.contiguous()
            p.data = self._view(self.values, start, old)
            p.data.copy_(old)
            p.grad = self._view(self.grads, start, old)
            start += p.numel()

    @staticmethod
    def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
        """A view of `buffer` with the shape and (dense) strides of `like`."""
        return buffer.as_strided(like.shape, like.stride(), start)

    def holds(self, net: nn.Module) -> bool:
        """Whether every parameter of the net still is a view of this buffer, at its place."""
        place, width = self.values.data_ptr(), self.values.element_size()
        for _, p in module_index(net).parameters:
            if p.numel() and p.data_ptr() != place:
                return False
            place += p.numel() * width
        return True

    def vector(self, net: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name as one vector that lies as `values` do; it may share their memory."""
        if self.plain and isinstance(tensors, Tensors) and tensors.layout == module_index(net).layout:
            assert tensors.flat is not None
            return tensors.flat
        made, start = torch.zeros_like(self.values), 0
        for name, p in module_index(net).parameters:
            self._view(made, start, p.data).copy_(tensors[name])
            start += p.numel()
        return made

    def runs(self, net: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """(values, gradients) of each contiguous run of parameters that train."""
        which = tuple(p.requires_grad for _, p in module_index(net).parameters)
        if which not in self.known:
            self.known[which] = self._find_runs(net)
        return self.known[which]

    def _find_runs(self, net: nn.Module) -> list[tuple[Tensor, Tensor]]:
        spans: list[list[int]] = []
        start = 0
        for _, p in module_index(net).parameters:
            end = start + p.numel()
            if p.requires_grad:
                if spans and spans[-1][1] == start:
                    spans[-1][1] = end
                else:
                    spans.append([start, end])
            start = end
        return [(self.values[a:b], self.grads[a:b]) for a, b in spans]


def held_flat(net: nn.Module) -> Flat | None:
    """The net's flat buffer if it has one, its parameters are in it, and they lie as in `Tensors.flat`."""
    flat = net.__dict__.get("_flat")
    return flat if flat is not None and flat.plain and flat.holds(net) else None


def flat_of(net: nn.Module) -> Flat:
    """The net's flat buffer, made on first use.

    It is made again if any parameter has moved, as when the head was trained as part of another net.
    """
    flat = net.__dict__.get("_flat")
    if flat is None or not flat.holds(net):
        flat = net.__dict__["_flat"] = Flat(net)
    assert isinstance(flat, Flat)
    return flat


class FlatDescent:
    """SGD with momentum and weight decay, or Adam, on flat runs; the same rule as torch.optim."""

    def __init__(self, net: nn.Module, training: Training, corrected: Corrected | None = None) -> None:
        """`corrected`: its terms' gradient is what each step's gradient starts from."""
        flat = flat_of(net)
        self.values, self.grads, self.training = flat.values, flat.grads, training
        self.strength = corrected.strength if corrected else 0.0
        self.tilt = flat.vector(net, corrected.tilt) if corrected and corrected.tilt is not None else None
        self.anchor = flat.vector(net, corrected.anchor) if corrected and corrected.anchor is not None else None
        self.runs = flat.runs(net)
        self.velocity: list[Tensor] = []
        self.adams: Sequence[FlatAdam | torch.optim.Adam] = ()
        if training.optimiser == "adam":
            lr, decay = training.lr, training.weight_decay
            if self.values.device.type == "cpu":
                self.adams = [FlatAdam(values, grad, lr=lr, weight_decay=decay) for values, grad in self.runs]
            else:
                leaves = [values.detach().requires_grad_() for values, _ in self.runs]
                for leaf, (_, grad) in zip(leaves, self.runs, strict=True):
                    leaf.grad = grad
                self.adams = [torch.optim.Adam(leaves, lr=lr, weight_decay=decay)]

    def zero_grad(self) -> None:
        if self.anchor is None:
            self.grads.zero_() if self.tilt is None else self.grads.copy_(self.tilt)
            return
        torch.sub(self.values, self.anchor, out=self.grads).mul_(self.strength)
        if self.tilt is not None:
            self.grads.add_(self.tilt)

    def add_terms(self) -> None:
        """Add the corrected terms to the gradients, where these did not start from `zero_grad`."""
        if self.anchor is not None:
            start = (self.values - self.anchor).mul_(self.strength)
            self.grads.add_(start if self.tilt is None else start.add_(self.tilt))
        elif self.tilt is not None:
            self.grads.add_(self.tilt)

    def step(self) -> None:  # not tracked by autograd, so no_grad is unnecessary
        settings = self.training
        if settings.clip is not None:
            norm = torch.stack([grad.norm() for _, grad in self.runs]).norm()
            scale = (settings.clip / (norm + 1e-6)).clamp(max=1.0)
            for _, grad in self.runs:
                grad.mul_(scale)
        if settings.optimiser == "adam":
            for adam in self.adams:
                adam.step()
            return
        first = not self.velocity
        for i, (values, grad) in enumerate(self.runs):
            if settings.weight_decay:
                grad.add_(values, alpha=settings.weight_decay)
            if settings.momentum:
                if first:
                    self.velocity.append(grad.clone())
                else:
                    self.velocity[i].mul_(settings.momentum).add_(grad)
                grad = self.velocity[i]
            values.add_(grad, alpha=-settings.lr)


class PlainDescent:
    """torch.optim, as anyone would write it: the reference the flat one is tested against."""

    def __init__(self, net: nn.Module, training: Training) -> None:
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.clip = training.clip
        self.optimiser: torch.optim.Optimizer
        if training.optimiser == "adam":
            self.optimiser = torch.optim.Adam(self.parameters, lr=training.lr, weight_decay=training.weight_decay)
        else:
            self.optimiser = torch.optim.SGD(
                self.parameters, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
            )

    def zero_grad(self) -> None:
        self.optimiser.zero_grad()

    def step(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
