"""FedNCM: Guiding The Last Layer in Federated Learning with Pre-Trained Models.

Legate, Bernier, Page-Caccia, Oyallon, Belilovsky. NeurIPS 2023. arXiv:2306.03937

Nothing is trained. With z the features under the initial (pre-trained) body:
    client   sends S_c = sum of its z of class c, and n_c
    server   mu_c = sum_i S_c / sum_i n_c;  the head has rows mu_c / |mu_c| and no bias
A client sends its sums once; in later rounds it sends zeros, so every sample counts once whatever the cohorts.
distance=euclidean: rows 2 mu_c and bias -|mu_c|^2, whose largest logit is the nearest mean.
A class that no client has gets the bias -10000, so that it is never predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedskew.core.method import Method, Paper, Update
from fedskew.core.settings import UsageError, setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.methods._shared.heads import HEAD
from fedskew.methods._shared.prototypes import enough

SUMS = "class_sums"  # group of the payload: S and n
SENT = "sent"  # group of a client's state: that it has sent its sums
NEVER = -1e4  # bias of a class without samples


def nearest_mean_head(total: Tensor, count: Tensor, distance: str) -> tuple[Tensor, Tensor]:
    """Weight [C, d] and bias [C] of the head, from the sums [C, d] and counts [C] of all clients."""
    mean = total / count.clamp(min=1)[:, None]
    weight = normalize(mean) if distance == "cosine" else 2 * mean
    bias = torch.zeros_like(count) if distance == "cosine" else -mean.square().sum(1)
    return weight, torch.where(count > 0, bias, NEVER)


def no_sums(site: Site) -> Tensors:
    """Sums and counts of no samples, in double precision."""
    total = torch.zeros(site.classes, site.net.features, dtype=torch.float64)
    return Tensors(total=total, count=torch.zeros(site.classes, dtype=torch.float64))


@dataclass(frozen=True)
class FedNCM(Method):
    """Classifies by the nearest class mean of the features of a net that is not trained; one round is enough."""

    paper = Paper(
        title="Guiding The Last Layer in Federated Learning with Pre-Trained Models",
        authors="Legate, Bernier, Page-Caccia, Oyallon, Belilovsky",
        venue="NeurIPS 2023",
        link="arXiv:2306.03937",
    )
    formula = (
        r"\mu_c = \frac{\sum_i \sum_{z \in Z_{ic}} z}{\sum_i n_{ic}}, "
        r"\qquad \hat{y}(z) = \underset{c}{\mathrm{argmax}} \; \frac{\langle z, \mu_c \rangle}{\lVert \mu_c \rVert}"
    )
    terms_off = None  # it does not train
    weak_where = {"everywhere": "the net is never trained, so without pre-trained weights its features are random."}

    distance: Literal["cosine", "euclidean"] = setting(
        "cosine", help="Nearest by angle, or by distance.", source="the paper"
    )

    def init_server(self, site: Site) -> Payload:
        if not isinstance(site.net.head, nn.Linear) or site.net.head.bias is None:
            raise UsageError("fedncm needs a model whose head is one linear layer with a bias, such as simple-cnn.")
        return super().init_server(site) | {SUMS: no_sums(site)}

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        sums = no_sums(site)
        if SENT not in state:
            site.load()
            sums["total"].index_add_(0, site.data.labels, site.infer(site.net.body).double())
            sums["count"] += torch.bincount(site.data.labels, minlength=site.classes)
            sums = enough(sums, site.min_count)
        return Update({SUMS: sums}, float(len(site.data))), state | {SENT: Tensors(done=torch.ones(()))}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sums = server[SUMS]
        for update in updates:
            sums = sums + update.payload[SUMS]
        weight, bias = nearest_mean_head(sums["total"], sums["count"], self.distance)
        head = Tensors({f"{HEAD}weight": weight.float(), f"{HEAD}bias": bias.float()})
        return server | {"parameters": server["parameters"] | head, SUMS: sums}
