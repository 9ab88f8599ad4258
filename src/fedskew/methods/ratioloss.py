"""Ratio Loss: Addressing Class Imbalance in Federated Learning.

Wang, Xu, Wang, Zhu. AAAI 2021. arXiv:2008.06217

    Eq. 9:  L = (a + b R_y) CE, batch mean; R comes with the broadcast, in the first round there is none: L = CE
The monitor: for each class p the server trains a copy of the model it sent on D0's samples of p alone, as a client
would. d_p is the change of the classifier's weights. A weight belongs to p if d_p is the largest there and no other
|d_q| is more than 80 % of it.
    R_p = |sum of d_p| / |sum of mean_{q != p} d_q|, over p's weights; 10 where the lower sum is 0, 5000 at most
It costs C numbers a broadcast. As in the authors' code R depends on D0 and the model alone; the classes' shares that
the paper also estimates are not used by the loss.
Departure: the mean over clients is by samples, as everywhere here (the code's is plain).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.core.method import Method, Update, model_of
from fedskew.core.net import Net
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import NotNegative, Positive
from fedskew.methods._shared.distillation import last_linear, trained

RATIO = "ratio"  # group of the payload
NEAR, NONE, MOST = 0.8, 10.0, 5000.0


def ratios(d: Tensor) -> Tensor:
    """R [C] from the changes d [C, ...] of the classifier's weights, one row for each class's copy."""
    d = d.flatten(1).double()
    C, (most, owner) = len(d), d.max(0)
    rivals = (d.abs() > NEAR * most.abs()).sum(0)  # itself is one, unless nothing moved
    owner = torch.where(rivals == 1, owner, C)  # C: nobody's
    sums = torch.zeros(C + 1, 2, dtype=d.dtype)
    own, others = sums.index_add_(0, owner, torch.stack([most, (d.sum(0) - most) / (C - 1)], 1))[:C].abs().T
    return torch.where(others == 0, NONE, own / others).clamp(max=MOST).float()


@dataclass(frozen=True)
class RatioLoss(Method):
    public: ClassVar[bool] = True

    a: Positive = 1.0  # the original's
    b: NotNegative = 0.1  # the original's; 0 and a = 1: FedAvg

    def init_server(self, site: Site) -> Payload:
        return super().init_server(site) | {RATIO: Tensors(weight=torch.ones(site.classes))}

    def broadcast(self, server: Payload) -> Payload:
        return server

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        weight = broadcast[RATIO]["weight"].to(site.device)
        return site.loss if (weight == 1).all() else partial(weighted, weight)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        fresh = super().aggregate(site, server, updates)
        R = self.monitor(site, model_of(server)) if self.b else torch.zeros(site.classes)
        return fresh | {RATIO: Tensors(weight=self.a + self.b * R)}

    def monitor(self, site: Site, model: Payload) -> Tensor:
        """R from what each class of D0 alone does to the model."""
        name, labels = f"{last_linear(site.net)}.weight", site.data.labels
        parts = (site.data.part((labels == c).nonzero().flatten()) for c in range(site.classes))
        copies = (trained(replace(site, data=part), model, site.loss, site.training) for part in parts)
        return ratios(torch.stack([copy["parameters"][name] - model["parameters"][name] for copy in copies]))


def weighted(weight: Tensor, net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 9."""
    return (weight[y] * cross_entropy(net(x), y, reduction="none")).mean()
