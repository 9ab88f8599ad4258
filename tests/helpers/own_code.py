"""A file of a user's with a method and nets, as the README shows one, and methods with planted faults."""

MY = '''
from dataclasses import dataclass

import torch
from torch import nn

import fedskew
from fedskew.core.losses import proximal


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
class Fails(Pull):
    def aggregate(self, site, server, updates):
        raise KeyError("prototypes")
'''
