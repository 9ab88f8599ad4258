"""FineTune: FedAvg, then each client trains the server's model on its own data before it uses it.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage.
Federated Evaluation of On-device Personalization. 2019. arXiv:1910.10252
"""

from dataclasses import dataclass

from fedskew.core.fit import fit
from fedskew.core.method import Method
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural


@dataclass(frozen=True)
class FineTune(Method):
    epochs: Natural = 5  # FedBABU's comparison; 0 is FedAvg

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        site.load(broadcast, state)
        fit(site, self.objective(site, broadcast, state), epochs=self.epochs)
        return site.model()
