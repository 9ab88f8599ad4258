"""A place that can train: a client's machine or the server's, as a method sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.core.fast.flat import held_flat
from fedskew.core.fast.module_index import module_index
from fedskew.core.losses import plain
from fedskew.core.net import Net
from fedskew.core.samples import Data, pieces, to_device
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training

Loss = Callable[[Any, Tensor, Tensor], Tensor]  # (net, x, y) -> scalar


@dataclass
class Site:
    """A net to train with, the samples that live here, and the settings of this round.

    A site is made from (seed, client, round) alone and thrown away after the call it was made for. It owns no
    state of a method: what must survive a round is returned by the method.
    """

    net: Any  # a Net; holds whatever the last call left in it: `load` first
    data: Data  # a client's private training data, or the server's public data
    training: Training  # as it is in this round, the learning rate resolved
    classes: int
    population: int  # clients in the federation, not in this round's cohort
    initial: Payload  # the model every site starts from; it follows from the seed, so all sites know it
    rng: torch.Generator
    client: int = -1  # -1 is the server
    round: int = 0
    rounds: int = 1
    stage: str = "train"  # see Method.stages
    fast: bool = True  # False: plain layers and torch.optim, the reference
    device: str = "cpu"
    loss: Loss = plain  # the task's own loss, to which methods add their terms
    min_count: int = 1  # a class statistic of fewer samples must not leave this site
    cores: int = 1  # of the server's site: threads it may use, one for each of several models
    spares: list[Any] = field(default_factory=list)  # nets that `frozen` may reuse
    used: int = 0

    def load(self, *models: Payload) -> None:
        """Fill the net: the initial model, overlaid by each payload's parameters and buffers in turn."""
        fill(self.net, self.initial, *models)

    def parameters(self) -> Tensors:
        """A copy of the net's parameters."""
        return self._shared_parameters(())

    def buffers(self) -> Tensors:
        """A copy of the net's buffers (batch-norm statistics)."""
        return self._copies(module_index(self.net).buffers)

    def model(self) -> Payload:
        """A copy of the whole model in the net: groups "parameters" and "buffers"."""
        return {"parameters": self.parameters(), "buffers": self.buffers()}

    def shares(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site sends of the model in its net: all but the personal part and buffers that stay here."""
        index = module_index(self.net)
        shared = {"parameters": self._shared_parameters(personal)}
        if self.training.batch_norm == "aggregate":
            shared["buffers"] = self._copies(index.buffers, personal)
        return shared

    def keeps(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site keeps of the model in its net: the complement of `shares`, without empty groups."""
        index = module_index(self.net)
        local = self.training.batch_norm == "local"
        kept = {
            "parameters": self._copies(index.parameters, personal, inside=True),
            "buffers": self.buffers() if local else self._copies(index.buffers, personal, inside=True),
        }
        return {group: tensors for group, tensors in kept.items() if tensors}

    def _shared_parameters(self, personal: tuple[str, ...]) -> Tensors:
        """A copy of the parameters that are not personal, as views of one vector if that is possible."""
        index = module_index(self.net)
        flat = held_flat(self.net) if self.device == "cpu" and not personal else None
        if flat is not None:
            return Tensors.views(flat.values.clone(), index.layout)
        entries = [(name, p.detach()) for name, p in index.parameters if not name.startswith(personal)]
        if self.device != "cpu" or len({p.dtype for _, p in entries}) != 1:
            return self._copies(entries)
        return Tensors.views(torch.cat([p.reshape(-1) for _, p in entries]), dict(entries))

    @staticmethod
    def _copies(
        entries: Iterable[tuple[str, Tensor]], prefixes: tuple[str, ...] = (), *, inside: bool = False
    ) -> Tensors:
        """Copies of the entries whose names start with one of `prefixes` (`inside`), or of those whose names do not."""
        return Tensors({name: copied(t) for name, t in entries if name.startswith(prefixes) == inside})

    def frozen(self, *models: Payload) -> Any:
        """A second net that holds a model and never trains: a teacher, a past model. Valid while this site is."""
        if self.used == len(self.spares):
            spare = copy.deepcopy(self.net).requires_grad_(False)
            self.spares.append(spare)
        net = self.spares[self.used]
        self.used += 1
        fill(net.eval(), self.initial, *models)
        return net

    @torch.no_grad()
    def infer(self, function: Callable[[Tensor], Tensor], data: Data | None = None, batch: int = 200) -> Tensor:
        """`function` over all samples of `data` (None: the site's) in order, in evaluation mode, without gradient."""
        self.net.eval()
        data = self.data if data is None else data
        return torch.cat([function(to_device(data.take(p)[0], self.device)).cpu() for p in pieces(len(data), batch)])

    def head_only(self, data: Data | None = None) -> Site:
        """A site whose net is a copy of the head and whose data are features.

        `data` holds features and labels; None takes this site's samples under the body in its net, computed once
        in evaluation mode. Names of parameters and losses are those of the whole net, so
        `fit(site.head_only(), loss, train="head.")` trains the head without running the body again; load the
        result with `site.load(model, heads.model())`. With None it returns this site itself where features are
        not constant (augmentation) or there are no samples.
        """
        if data is None:
            if self.training.augment or not len(self.data):
                return self
            features = self.infer(self.net.body)
            data = Data(features, self.data.labels, torch.arange(len(features)))
        # a copy, so that the head's parameters stay in the whole net's flat buffer
        net = Net(nn.Identity(), copy.deepcopy(self.net.head), self.net.features)
        return replace(self, net=net, data=data, spares=[], used=0)


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, without gradient."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _filled_at_once(net: nn.Module, source: Tensors) -> bool:
    """Copy all parameters as one vector if both sides are one; otherwise do nothing."""
    flat = held_flat(net) if source.layout == module_index(net).layout else None
    if flat is None or source.flat is None:
        return False
    flat.values.copy_(source.flat)
    return True


def fill(net: nn.Module, *models: Payload) -> None:
    """Copy models into a net, later ones over earlier ones; every parameter and buffer must be in one of them."""
    index = module_index(net)
    for group, entries in (("parameters", index.parameters), ("buffers", index.buffers)):
        values = [model[group] for model in reversed(models) if group in model]
        if group == "parameters" and values and _filled_at_once(net, values[0]):
            continue
        for name, place in entries:
            source = next((v[name] for v in values if name in v), None)
            if source is None:
                raise ValueError(f"no {group} named {name} in the models to load")
            place.detach().copy_(source)
