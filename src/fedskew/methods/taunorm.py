"""FedAvg + tau-norm: Decoupling Representation and Classifier for Long-Tailed Recognition.

Kang, Xie, Rohrbach, Yan, Gordo, Feng, Kalantidis. ICLR 2020. arXiv:1910.09217

    w_c <- w_c / |w_c|^tau for the rows w_c of the classifier; its bias is dropped
Training is FedAvg's: the server's `parameters` are the normalised model, which is tested and deployed after every
round; the group `trained` holds the classifier as averaged, from which clients go on. It costs C (d + 1) numbers a
broadcast.
The classifier is the head's last linear layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedskew.core.method import Method, Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import NotNegative


def normalised(weight: Tensor, tau: float) -> Tensor:
    """w_c / |w_c|^tau; a row of zeros stays one."""
    norm = weight.norm(dim=1, keepdim=True)
    return weight / torch.where(norm > 0, norm, 1.0) ** tau


@dataclass(frozen=True)
class TauNorm(Method):
    tau: NotNegative = 1.0  # FedDDC does not say; its result fits 1. The original sweeps 0 to 2 on validation data
    drop_bias: bool = True  # the original's; False and tau 0: FedAvg

    def init_server(self, site: Site) -> Payload:
        return self.deployed(site, super().init_server(site))

    def broadcast(self, server: Payload) -> Payload:
        return server

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        return super().client(site, as_trained(broadcast), state)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return self.deployed(site, super().aggregate(site, as_trained(server), updates))

    def deployed(self, site: Site, model: Payload) -> Payload:
        """The model with its classifier normalised, and the classifier as it was."""
        if self.tau == 0 and not self.drop_bias:
            return model
        *_, layer = (name for name, part in site.net.named_modules() if isinstance(part, nn.Linear))
        trained = model["parameters"].split(f"{layer}.")[1]
        fresh = Tensors({f"{layer}.weight": normalised(trained[f"{layer}.weight"], self.tau)})
        if self.drop_bias and f"{layer}.bias" in trained:
            fresh[f"{layer}.bias"] = torch.zeros_like(trained[f"{layer}.bias"])
        return model | {"parameters": model["parameters"] | fresh, "trained": trained}


def as_trained(payload: Payload) -> Payload:
    """The payload's model with the classifier that training goes on from, in place of the normalised one."""
    return payload | {"parameters": payload["parameters"] | payload.get("trained", Tensors())}
