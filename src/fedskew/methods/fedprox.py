"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. arXiv:1812.06127

Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 |w - w_t|^2, over trainable parameters
Departure: every client runs all its epochs (no variable work).
"""

from dataclasses import dataclass

from fedskew.core.method import Method, Paper
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative
from fedskew.methods._shared.control_variates import tethered


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a penalty on each client's distance from the global model."""

    paper = Paper(
        title="Federated Optimization in Heterogeneous Networks",
        authors="Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith",
        venue="MLSys 2020",
        link="arXiv:1812.06127",
    )
    formula = r"h_k(w; w_t) = F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2"
    terms_off = {"mu": 0.0}

    mu: NotNegative = setting(
        0.01,
        help="Weight of |w - w_t|^2 / 2 in each client's loss; 0 gives FedAvg.",
        source="MOON's choice for CIFAR-10; the paper tries 0.001 to 1",
        search=(0.001, 1.0),
    )

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tethered(site.loss, broadcast["parameters"], self.mu)
