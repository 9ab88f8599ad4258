"""A file of a user's with a method and nets, as the README shows one, and methods with planted faults."""

MY = '''
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

import fedskew
from fedskew.core.losses import proximal
from fedskew.core.tensors import Tensors


@dataclass(frozen=True)
class Pull(fedskew.Method):
    """FedAvg, and |w - w_t|^2 added to each client's loss."""

    mu: float = 0.1
    terms_off = {"mu": 0.0}

    def objective(self, site, broadcast, state):
        anchor = site.parameters()
        if not self.mu:
            return site.loss
        return lambda net, x, y: site.loss(net, x, y) + self.mu * proximal(net.named_parameters(), anchor)


def net(shape, classes, width=16):
    inputs = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


module = net((1, 8, 8), 10)
no_method = 3


class Loose(fedskew.Method):
    mu: float = 0.1


@dataclass(frozen=True)
class ChangesItsArguments(Pull):
    def client(self, site, broadcast, state):
        broadcast["parameters"]["head.bias"].add_(1.0)
        return super().client(site, broadcast, state)


@dataclass(frozen=True)
class DrawsGlobally(Pull):
    def aggregate(self, site, server, updates):
        fresh = super().aggregate(site, server, updates)
        return fresh | {"parameters": fresh["parameters"] * (1 + 1e-6 * float(torch.rand(())))}


SEEN = []


@dataclass(frozen=True)
class Remembers(Pull):
    def aggregate(self, site, server, updates):
        SEEN.append(site.round)
        fresh = super().aggregate(site, server, updates)
        return fresh | {"parameters": fresh["parameters"] * (1 + 1e-6 * len(SEEN))}


@dataclass(frozen=True)
class OffIsNotFedAvg(Pull):
    def aggregate(self, site, server, updates):
        fresh = super().aggregate(site, server, updates)
        return fresh | {"parameters": fresh["parameters"] * 0.5}


@dataclass(frozen=True)
class SeedsTorch(Pull):
    def client(self, site, broadcast, state):
        torch.manual_seed(0)
        return super().client(site, broadcast, state)


@dataclass(frozen=True)
class DrawsFromNumpy(Pull):
    def client(self, site, broadcast, state):
        np.random.rand()
        return super().client(site, broadcast, state)


@dataclass(frozen=True)
class IgnoresTheSeed(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        noise = torch.rand((), generator=torch.Generator().manual_seed(7))
        return update.plus(parameters=update.payload["parameters"] * (1 + 1e-3 * noise)), state


@dataclass(frozen=True)
class SendsDoubles(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        doubles = {name: t.double() for name, t in update.payload["parameters"].items()}
        return update.plus(parameters=fedskew.core.tensors.Tensors(doubles)), state


@dataclass(frozen=True)
class LastOneCounts(Pull):
    def aggregate(self, site, server, updates):
        x = server["parameters"]
        for update in updates:
            x = x * 0.5 + update.payload["parameters"] * 0.5
        return server | {"parameters": x}


@dataclass(frozen=True)
class KeepsInItself(Pull):
    seen: list = field(default_factory=list)

    def aggregate(self, site, server, updates):
        self.seen.append(site.round)
        fresh = super().aggregate(site, server, updates)
        return fresh | {"parameters": fresh["parameters"] * (1 + 1e-6 * len(self.seen))}


@dataclass(frozen=True)
class ForgetsTheState(Pull):
    def client(self, site, broadcast, state):
        return super().client(site, broadcast, state)[0]


@dataclass(frozen=True)
class ReturnsNothing(Pull):
    def aggregate(self, site, server, updates):
        super().aggregate(site, server, updates)


@dataclass(frozen=True)
class WalksAway(Pull):
    def aggregate(self, site, server, updates):
        moved = super().aggregate(site, server, updates)["parameters"] - server["parameters"]
        return server | {"parameters": server["parameters"] - moved}


@dataclass(frozen=True)
class Fails(Pull):
    def aggregate(self, site, server, updates):
        raise KeyError("prototypes")


@dataclass(frozen=True)
class LeaksSamples(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        return update.plus(extra=Tensors(batch=site.data.take(torch.arange(2))[0])), state


@dataclass(frozen=True)
class LeaksBytes(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        return update.plus(extra=Tensors(first=site.data.x[site.data.index[0]])), state


@dataclass(frozen=True)
class LeaksLabels(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        return update.plus(extra=Tensors(y=site.data.labels[:10].float())), state


@dataclass(frozen=True)
class ChangesTheData(Pull):
    def client(self, site, broadcast, state):
        site.data.x[site.data.index] //= 2
        return super().client(site, broadcast, state)


@dataclass(frozen=True)
class SetsTorch(Pull):
    def client(self, site, broadcast, state):
        made = super().client(site, broadcast, state)
        torch.set_default_dtype(torch.float64)
        return made


@dataclass(frozen=True)
class NeedsTwoClasses(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        spread = len(site.data.labels.unique()) - 1.0
        moved = {"parameters": update.payload["parameters"] * float(torch.tensor(spread) / spread if spread else "nan")}
        return replace(update, payload=update.payload | moved), state


@dataclass(frozen=True)
class WeighsByNumber(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        return replace(update, weight=1.0 + site.client), state


@dataclass(frozen=True)
class CountsRounds(Pull):
    def client(self, site, broadcast, state):
        update, state = super().client(site, broadcast, state)
        left = 1 - 1e-3 * site.round / site.rounds
        return replace(update, payload=update.payload | {"parameters": update.payload["parameters"] * left}), state


@dataclass(frozen=True)
class CountsRoundsAndSaysSo(CountsRounds):
    @property
    def depends_on_rounds(self):
        return True
'''
