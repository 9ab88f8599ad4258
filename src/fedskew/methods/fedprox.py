"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. arXiv:1812.06127

Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 |w - w_t|^2, over trainable parameters
Departure: every client runs all its epochs (no variable work).
"""

from dataclasses import dataclass

from fedskew.drift import tethered
from fedskew.method import Method
from fedskew.site import Loss, Site
from fedskew.tensors import Payload
from fedskew.training import NotNegative


@dataclass(frozen=True)
class FedProx(Method):
    mu: NotNegative = 0.01  # the original's choices are 0.001 to 1; MOON's pick for CIFAR-10

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tethered(site.loss, broadcast["parameters"], self.mu)
