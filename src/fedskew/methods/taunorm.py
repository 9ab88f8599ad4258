"""FedAvg + tau-norm: Decoupling Representation and Classifier for Long-Tailed Recognition.

Kang, Xie, Rohrbach, Yan, Gordo, Feng, Kalantidis. ICLR 2020. arXiv:1910.09217

    w_c <- w_c / |w_c|^tau for the rows w_c of the classifier; its bias is dropped
Training is FedAvg's. The server's `parameters` are the normalised model, which is evaluated and deployed after every
round. The group `trained` holds the classifier as averaged, from which clients continue; it adds C (d + 1) numbers to
the broadcast. The classifier is the last linear layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.core.method import Method, Paper, Update
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import NotNegative
from fedskew.methods._shared.heads import as_trained, deploy_head, last_linear


def tau_normalise(weight: Tensor, tau: float) -> Tensor:
    """w_c / |w_c|^tau for each row w_c; a row of zeros stays zero."""
    norm = weight.norm(dim=1, keepdim=True)
    return weight / torch.where(norm > 0, norm, 1.0) ** tau


@dataclass(frozen=True)
class TauNorm(Method):
    """FedAvg whose deployed classifier has its rows divided by a power of their norms."""

    paper = Paper(
        title="Decoupling Representation and Classifier for Long-Tailed Recognition",
        authors="Kang, Xie, Rohrbach, Yan, Gordo, Feng, Kalantidis",
        venue="ICLR 2020",
        link="arXiv:1910.09217",
    )
    formula = r"w_c \leftarrow \frac{w_c}{\lVert w_c \rVert^{\tau}}"
    terms_off = {"tau": 0.0, "drop_bias": False}

    tau: NotNegative = setting(
        1.0,
        help="Power of the norm; 0 leaves the rows as they are.",
        source="our choice, which fits FedDDC's result; the paper sweeps 0 to 2 on validation data",
        search=(0.1, 10.0),
    )
    drop_bias: bool = setting(True, help="Set the bias to 0; False (with tau 0) gives FedAvg.", source="the paper")

    def init_server(self, site: Site) -> Payload:
        return self.deployed(site, super().init_server(site))

    def broadcast(self, server: Payload) -> Payload:
        return server

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        return super().client(site, as_trained(broadcast), state)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return self.deployed(site, super().aggregate(site, as_trained(server), updates))

    def deployed(self, site: Site, model: Payload) -> Payload:
        """The model with its classifier normalised; the classifier as averaged goes to the group `trained`."""
        if self.tau == 0 and not self.drop_bias:
            return model
        w, layer = model["parameters"], last_linear(site.net)
        head = Tensors({f"{layer}.weight": tau_normalise(w[f"{layer}.weight"], self.tau)})
        if self.drop_bias and f"{layer}.bias" in w:
            head[f"{layer}.bias"] = torch.zeros_like(w[f"{layer}.bias"])
        return deploy_head(model, f"{layer}.", head)
