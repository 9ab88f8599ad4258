"""A place that can train, and `fit`, the only training loop there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.core.fast.module_index import anatomy
from fedskew.core.losses import plain
from fedskew.core.samples import Data, pieces
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training

Loss = Callable[[Any, Tensor, Tensor], Tensor]  # (net, x, y) -> scalar


@dataclass
class Site:
    """One client's machine, or the server's. Owns no method state."""

    net: Any  # a Net; scratch: overwritten at will, meaningless between calls
    data: Data  # a client's private training data, or the server's public data
    training: Training  # as it is in this round
    classes: int
    population: int  # clients in the federation, not in this round's cohort
    initial: Payload  # the model every site starts from, known to all by its seed
    rng: torch.Generator
    client: int = -1  # -1 is the server
    round: int = 0
    rounds: int = 1
    stage: str = "train"  # see Method.stages
    fast: bool = True  # False: plain layers and torch.optim, the reference
    device: str = "cpu"
    loss: Loss = plain  # the task's own loss, to which methods add their terms
    spares: list[Any] = field(default_factory=list)  # nets that `frozen` may use again
    used: int = 0

    def load(self, *models: Payload) -> None:
        """Fill the net: the initial model, overlaid by each payload's parameters and buffers in turn."""
        fill(self.net, self.initial, *models)

    def parameters(self) -> Tensors:
        """The net's parameters, copied."""
        return self._copies(anatomy(self.net).parameters)

    def buffers(self) -> Tensors:
        """The net's buffers, copied."""
        return self._copies(anatomy(self.net).buffers)

    @staticmethod
    def _copies(entries: Iterable[tuple[str, Tensor]], inside: tuple[str, ...] = (), *, of: bool = False) -> Tensors:
        """Copies of the entries whose names do (`of`), or do not, start with one of the prefixes `inside`."""
        return Tensors({name: copied(t) for name, t in entries if name.startswith(inside) == of})

    def model(self) -> Payload:
        return {"parameters": self.parameters(), "buffers": self.buffers()}

    def shares(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site sends of the model in its net: all but the personal part and buffers that stay."""
        own = anatomy(self.net)
        shared = {"parameters": self._copies(own.parameters, personal)}
        if self.training.batch_norm == "aggregate":
            shared["buffers"] = self._copies(own.buffers, personal)
        return shared

    def keeps(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site keeps of the model in its net: the complement of `shares`, empty groups left out."""
        own = anatomy(self.net)
        local = self.training.batch_norm == "local"
        kept = {
            "parameters": self._copies(own.parameters, personal, of=True),
            "buffers": self.buffers() if local else self._copies(own.buffers, personal, of=True),
        }
        return {group: tensors for group, tensors in kept.items() if tensors}

    def frozen(self, *models: Payload) -> Any:
        """A net that holds a model and will not move: a teacher, a past model. Valid while this site lives."""
        if self.used == len(self.spares):
            spare = copy.deepcopy(self.net).requires_grad_(False)
            self.spares.append(spare)
        net = self.spares[self.used]
        self.used += 1
        fill(net.eval(), self.initial, *models)
        return net

    @torch.no_grad()
    def infer(self, function: Callable[[Tensor], Tensor], data: Data | None = None, batch: int = 200) -> Tensor:
        """`function` over all the samples in order, in evaluation mode, without gradient."""
        self.net.eval()
        data = self.data if data is None else data
        return torch.cat([function(data.take(p)[0].to(self.device)).cpu() for p in pieces(len(data), batch)])


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def fill(net: nn.Module, *models: Payload) -> None:
    own = anatomy(net)
    for group, entries in (("parameters", own.parameters), ("buffers", own.buffers)):
        values = [model[group] for model in reversed(models) if group in model]
        for name, place in entries:
            source = next((v[name] for v in values if name in v), None)
            if source is None:
                raise ValueError(f"no {group} named {name} in the models to load")
            place.detach().copy_(source)
