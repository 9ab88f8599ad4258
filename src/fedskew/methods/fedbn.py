"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. arXiv:2102.07623

Algorithm 1: FedAvg, but a client keeps its own batch-norm layers (weight, bias and running statistics)
A net without batch norm gives FedAvg. `training.batch_norm = "local"` keeps the statistics only.
Departure: batch-norm layers are sent and averaged as well. Clients that have their own never use the mean; it makes the
global model, which new clients start from.
"""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper, Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload


def norm_layers(net: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of a net's batch-norm parameters and buffers."""
    return tuple(f"{name}." for name, layer in net.named_modules() if isinstance(layer, _BatchNorm))


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg in which every client keeps its own batch-norm layers."""

    paper = Paper(
        title="Federated Learning on Non-IID Features via Local Batch Normalization",
        authors="Li, Jiang, Zhang, Kamp, Dou",
        venue="ICLR 2021",
        link="arXiv:2102.07623",
    )
    formula = (
        r"x &\leftarrow \sum_{i \in S} p_i \, y_i \\ "
        r"\text{client } i &: \; \text{all layers of } x, \text{ but its own batch-norm layers } (\gamma_i, \beta_i, "
        r"\mu_i, \sigma_i)"
    )
    terms_off = None  # only a net without batch norm makes it FedAvg
    weak_where = {
        "resnet8": "probably because the global model has the mean of batch-norm layers that no client trains "
        "from; the personal models are what it is for: on digits split by Dirichlet 3.2 points below "
        "FedAvg's global model."
    }

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state))
        return self.report(site, {"loss": done.loss}), state | site.keeps(norm_layers(site.net))
