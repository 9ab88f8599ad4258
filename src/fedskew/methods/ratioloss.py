"""Ratio Loss: Addressing Class Imbalance in Federated Learning.

Wang, Xu, Wang, Zhu. AAAI 2021. arXiv:2008.06217

    Eq. 9:  L = (a + b R_y) CE, batch mean; R is part of the broadcast; in the first round there is none and L = CE
The monitor: for each class p the server trains a copy of the model it sent, with the clients' settings, on the samples
of p in D0 alone. d_p is the change of the classifier's weights. A weight belongs to p if d_p is the largest there and
no other |d_q| is more than 80 % of it.
    R_p = |sum of d_p| / |sum of mean_{q != p} d_q|, over p's weights; 10 where the lower sum is 0, at most `cap`
R adds C numbers to the broadcast. As in the authors' code it depends on D0 and the model only: the class shares that
the paper also estimates are not used by the loss.
Departure: the mean over clients is by samples (the authors' code: uniform).
Departure: cap is 10 (the authors' code: 5000). A class that weighs 501 times as much as in the cross entropy, which
happens on small data, makes training diverge.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.core.method import Method, Paper, Update, model_of
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import NotNegative, Positive
from fedskew.methods._shared.distillation import train_model
from fedskew.methods._shared.heads import last_linear

RATIO = "ratio"  # group of the payload
NEAR, EMPTY = 0.8, 10.0  # see the monitor above


def ratios(d: Tensor, cap: float) -> Tensor:
    """R [C], at most `cap`, from the changes d [C, ...] of the classifier's weights, one row per class."""
    d = d.flatten(1).double()
    C, (most, owner) = len(d), d.max(0)
    rivals = (d.abs() > NEAR * most.abs()).sum(0)  # counts the largest itself, unless nothing moved
    owner = torch.where(rivals == 1, owner, C)  # C: belongs to no class
    sums = torch.zeros(C + 1, 2, dtype=d.dtype)
    own, others = sums.index_add_(0, owner, torch.stack([most, (d.sum(0) - most) / (C - 1)], 1))[:C].abs().T
    return torch.where(others == 0, EMPTY, own / others).clamp(max=cap).float()


@dataclass(frozen=True)
class RatioLoss(Method):
    """Weights each class in the clients' loss by how rare the server estimates it to be from a public set."""

    paper = Paper(
        title="Addressing Class Imbalance in Federated Learning",
        authors="Wang, Xu, Wang, Zhu",
        venue="AAAI 2021",
        link="arXiv:2008.06217",
    )
    formula = (
        r"L = (a + b R_y) \, \mathrm{CE}, \qquad R_p = \frac{\lvert \sum d_p \rvert}{\lvert \sum \mathrm{mean}_{q \ne "
        r"p} \, d_q \rvert}"
    )
    terms_off = {"b": 0.0}
    public = True

    a: Positive = setting(1.0, help="Weight of plain cross entropy.", source="the paper", search=(0.1, 10.0))
    b: NotNegative = setting(
        0.1, help="Weight of the ratio R_y; 0 (with a = 1) gives FedAvg.", source="the paper", search=(0.01, 1.0)
    )

    cap: Positive = setting(
        10.0, help="Largest ratio R of a class.", source="our choice; the authors' code has 5000, which can diverge"
    )

    def init_server(self, site: Site) -> Payload:
        return super().init_server(site) | {RATIO: Tensors(weight=torch.ones(site.classes))}

    def broadcast(self, server: Payload) -> Payload:
        return server

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        weight = broadcast[RATIO]["weight"].to(site.device)
        return site.loss if (weight == 1).all() else partial(weighted_cross_entropy, weight)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        fresh = super().aggregate(site, server, updates)
        R = self.monitor(site, model_of(server)) if self.b else torch.zeros(site.classes)
        return fresh | {RATIO: Tensors(weight=self.a + self.b * R)}

    def monitor(self, site: Site, model: Payload) -> Tensor:
        """R: trains one copy of the model on each class of D0 and compares their classifiers."""
        name, labels = f"{last_linear(site.net)}.weight", site.data.labels
        parts = (site.data.part((labels == c).nonzero().flatten()) for c in range(site.classes))
        copies = (train_model(replace(site, data=part), model, site.loss, site.training) for part in parts)
        return ratios(torch.stack([copy["parameters"][name] - model["parameters"][name] for copy in copies]), self.cap)


def weighted_cross_entropy(weight: Tensor, net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 9."""
    return (weight[y] * cross_entropy(net(x), y, reduction="none")).mean()
