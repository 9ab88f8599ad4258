"""CCVR: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data.

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021. arXiv:2106.05001

FedAvg, then one more round, `calibrate`. For every class c, client i sends its number of samples N_ic, and the sums of
z and of z z^T over their features z under the final global body. The server computes:
    Eq. 3: mu_c = sum_i sum z / N_c,  N_c = sum_i N_ic
    Eq. 4: S_c  = (sum_i sum z z^T - N_c mu_c mu_c^T) / (N_c - 1)
    Alg. 1: draws `each` features of every class from N(mu_c, S_c) and trains the head on them, from its present values
Departure: sums are sent, not each client's mean and covariance (Eq. 3 and 4 have the same values).
Departure: the moments are of that round's cohort (the paper: of all clients); a class that none of it has is not drawn.
Departure: a class of one sample has S = 0; directions of negative variance, a rounding error, are left out.
Departure: number of features, epochs and learning rate of this step are ours; the paper's are not known to us.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper, Update
from fedskew.core.samples import Data
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, Positive
from fedskew.methods._shared.prototypes import enough

MOMENTS = "moments"  # group of the payload
CALIBRATE = "calibrate"  # stage of the last round


def class_moments(z: Tensor, y: Tensor, classes: int) -> Tensors:
    """Of each class: number of samples, sum of z and sum of z z^T; zeros for a class without samples.

    In double precision: a covariance is the small difference of two of them.
    """
    z, count = z.double(), torch.bincount(y, minlength=classes)
    total = torch.zeros(classes, z.shape[1], dtype=torch.float64).index_add_(0, y, z)
    square = torch.stack([z[y == c].T @ z[y == c] for c in range(classes)])
    return Tensors(count=count.double(), total=total, square=square)


def pool_moments(parts: Iterable[Tensors]) -> Tensors:
    """Eq. 3 and 4: number of samples, mean and unbiased covariance of each class over a stream of clients."""
    N = total = square = torch.zeros((), dtype=torch.float64)
    for part in parts:
        N, total, square = N + part["count"], total + part["total"], square + part["square"]
    mean = total / N.clamp(min=1)[:, None]
    covariance = (square - N[:, None, None] * mean[:, :, None] * mean[:, None, :]) / (N - 1).clamp(min=1)[:, None, None]
    return Tensors(count=N, mean=mean, covariance=covariance)


def sample_features(of: Tensors, each: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """`each` features of every class that has samples, from N(mean, covariance), and their labels."""
    present = of["count"].nonzero().flatten()
    symmetric = (of["covariance"] + of["covariance"].mT)[present] / 2
    variance, axes = torch.linalg.eigh(symmetric)
    root = axes * variance.clamp(min=0).sqrt()[:, None, :]
    eps = torch.randn(len(present), each, root.shape[1], generator=rng, dtype=torch.float64)
    z = of["mean"][present][:, None] + eps @ root.mT
    return z.flatten(0, 1).float(), present.repeat_interleave(each)


@dataclass(frozen=True)
class CCVR(Method):
    """FedAvg, then re-trains the classifier on features drawn from class-wise Gaussians of all clients."""

    paper = Paper(
        title="No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
        authors="Luo, Chen, Hu, Zhang, Liang, Feng",
        venue="NeurIPS 2021",
        link="arXiv:2106.05001",
    )
    formula = (
        r"\mu_c &= \frac{1}{N_c} \sum_i \sum_{z \in Z_{ic}} z, \qquad N_c = \sum_i N_{ic} \\ "
        r"\Sigma_c &= \frac{1}{N_c - 1} \Bigl( \sum_i \sum_{z \in Z_{ic}} z z^\top - N_c\, \mu_c \mu_c^\top \Bigr) \\ "
        r"h &\leftarrow \underset{h}{\mathrm{argmin}} \; \mathrm{CE}(h(z), c), "
        r"\qquad z \sim \mathcal{N}(\mu_c, \Sigma_c)"
    )
    terms_off = {"epochs": 0}
    quick = {"each": 10, "epochs": 1}

    each: Count = setting(200, help="Features drawn per class.", source="our choice")
    epochs: Natural = setting(10, help="Epochs over the drawn features; 0 gives FedAvg.", source="our choice")
    lr: Positive | None = setting(
        None, help="Learning rate of the calibration; None: that of the last round.", source="our choice"
    )

    def stages(self, rounds: int) -> Sequence[str]:
        return ["train"] * rounds + [CALIBRATE]

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        if site.stage != CALIBRATE:
            return super().client(site, broadcast, state)
        site.load(broadcast, state)
        moments = class_moments(site.infer(site.net.body), site.data.labels, site.classes)
        return Update({MOMENTS: enough(moments, site.min_count)}, float(len(site.data))), state

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if site.stage != CALIBRATE:
            return super().aggregate(site, server, updates)
        moments = pool_moments(update.payload[MOMENTS] for update in updates)
        if not moments["count"].any():  # no client has enough samples of any class
            return server
        z, y = sample_features(moments, self.each, site.rng)
        training = replace(site.training, lr=self.lr or site.training.lr, augment="")
        heads = replace(site, training=training).head_only(Data(z, y, torch.arange(len(y))))
        heads.load(server)
        fit(heads, site.loss, train="head.", epochs=self.epochs)
        return server | {"parameters": server["parameters"] | heads.parameters()}
