"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. arXiv:1812.06127

Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 |w - w_t|^2, over trainable parameters
Departure: every client runs all its epochs (no variable work).
"""

from dataclasses import dataclass

from fedskew.core.method import Method
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative
from fedskew.methods._shared.control_variates import tethered


@dataclass(frozen=True)
class FedProx(Method):
    mu: NotNegative = 0.01  # the original's choices are 0.001 to 1; MOON's pick for CIFAR-10

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tethered(site.loss, broadcast["parameters"], self.mu)
