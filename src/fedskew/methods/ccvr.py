"""CCVR: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data.

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021. arXiv:2106.05001

FedAvg, then one more round, `calibrate`. Client i sends for every class c its number of samples N_ic, and of their
features under the final global body the mean mu_ic and the (unbiased) covariance S_ic. The server:
    Eq. 3: mu_c = sum_i N_ic mu_ic / N_c,  N_c = sum_i N_ic
    Eq. 4: S_c  = sum_i (N_ic - 1) / (N_c - 1) S_ic + sum_i N_ic / (N_c - 1) mu_ic mu_ic^T - N_c / (N_c - 1) mu_c mu_c^T
    Alg. 1: `each` features of every class from N(mu_c, S_c); the head alone is trained on them, from where it is
Departure: the moments are of that round's cohort (the original asks all); a class that none of them has is not drawn.
Departure: a class of one sample has S = 0; directions of negative variance, which is rounding, are left out.
Departure: the learning rate is the last round's unless given; the original's settings of this step are not known to us.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, Positive
from fedskew.methods._shared.prototypes import class_means

MOMENTS = "moments"  # group of the payload
CALIBRATE = "calibrate"


def moments(z: Tensor, y: Tensor, classes: int) -> Tensors:
    """Samples, mean and unbiased covariance of each class; zeros where there is nothing to tell."""
    z, own = z.double(), class_means(z.double(), y, classes)
    x = z - own["mean"][y]
    scatter = torch.stack([x[y == c].T @ x[y == c] for c in range(classes)])
    covariance = scatter / (own["count"] - 1).clamp(min=1)[:, None, None]
    return Tensors(count=own["count"], mean=own["mean"].float(), covariance=covariance.float())


def pooled(parts: Iterable[Tensors]) -> Tensors:
    """Eq. 3 and 4 over a stream of clients, in double precision."""
    N = total = square = torch.zeros((), dtype=torch.float64)
    for part in parts:
        n, mu = part["count"].double(), part["mean"].double()
        N, total = N + n, total + n[:, None] * mu
        outer = n[:, None, None] * mu[:, :, None] * mu[:, None, :]
        square = square + (n - 1).clamp(min=0)[:, None, None] * part["covariance"] + outer
    mean = total / N.clamp(min=1)[:, None]
    covariance = (square - N[:, None, None] * mean[:, :, None] * mean[:, None, :]) / (N - 1).clamp(min=1)[:, None, None]
    return Tensors(count=N, mean=mean, covariance=covariance)


def gaussian(of: Tensors, each: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """`each` features of every class that has samples, from N(mean, covariance), and their labels."""
    there = of["count"].nonzero().flatten()
    symmetric = (of["covariance"] + of["covariance"].mT)[there] / 2
    variance, axes = torch.linalg.eigh(symmetric)
    root = axes * variance.clamp(min=0).sqrt()[:, None, :]
    eps = torch.randn(len(there), each, root.shape[1], generator=rng, dtype=torch.float64)
    z = of["mean"][there][:, None] + eps @ root.mT
    return z.flatten(0, 1).float(), there.repeat_interleave(each)


@dataclass(frozen=True)
class CCVR(Method):
    each: Count = 200  # ours
    epochs: Natural = 10  # ours; 0: FedAvg
    lr: Positive | None = None  # ours; None: the training's

    def stages(self, rounds: int) -> Sequence[str]:
        return ["train"] * rounds + [CALIBRATE]

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        if site.stage != CALIBRATE:
            return super().client(site, broadcast, state)
        site.load(broadcast, state)
        told = moments(site.infer(site.net.body), site.data.labels, site.classes)
        return Update({MOMENTS: told}, float(len(site.data))), state

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if site.stage != CALIBRATE:
            return super().aggregate(site, server, updates)
        z, y = gaussian(pooled(update.payload[MOMENTS] for update in updates), self.each, site.rng)
        head = Net(nn.Identity(), copy.deepcopy(site.net.head), site.net.features)
        training = replace(site.training, lr=self.lr or site.training.lr, augment="")
        heads = replace(site, net=head, data=Data(z, y, torch.arange(len(y))), training=training)
        heads.load(server)
        fit(heads, site.loss, train="head.", epochs=self.epochs)
        return server | {"parameters": server["parameters"] | heads.parameters()}
