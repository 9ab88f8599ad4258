"""FineTune: Federated Evaluation of On-device Personalization.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage. Preprint, 2019. arXiv:1910.10252

Training is FedAvg's. The personal model of a client is the global model after `epochs` of training on its own data.
"""

from dataclasses import dataclass

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural


@dataclass(frozen=True)
class FineTune(Method):
    """FedAvg; before use, each client trains the global model on its own data."""

    paper = Paper(
        title="Federated Evaluation of On-device Personalization",
        authors="Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage",
        venue="Preprint, 2019",
        link="arXiv:1910.10252",
    )
    formula = (
        r"x \leftarrow \sum_{i \in S} p_i \, y_i, \qquad v_i = \text{SGD on } f_i \text{ from } x, \text{ before use}"
    )
    terms_off = {}  # the global model is FedAvg's with any settings

    epochs: Natural = setting(5, help="Epochs of fine-tuning; 0 gives FedAvg.", source="FedBABU's comparison")

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        site.load(broadcast, state)
        fit(site, self.objective(site, broadcast, state), epochs=self.epochs)
        return site.model()
