"""FedBABU: Towards Enhanced Representation for Federated Image Classification.

Oh, Kim, Yun. ICLR 2022. arXiv:2106.06042

Algorithm 1, client: the body by SGD; the head stays at its random initial value, the same everywhere
Algorithm 1, server: body = mean of the cohort's bodies
Section 5: a client personalises the received model by fine-tuning it on its own data
The global model is (body, initial head), and it is what FedCRC's table reports.
Departure: the head is known to all by its seed, so it never crosses the wire.
Departure: fine-tuning has the learning rate of its round.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update, mean_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural

TUNED = {"head": "head.", "all": ""}


@dataclass(frozen=True)
class FedBABU(Method):
    personal = ("head.",)

    weighting: Literal["uniform", "samples"] = "uniform"  # the authors' code; FedCRC weights by samples
    finetune: Literal["none", "head", "all"] = "all"  # the original's personal model; none: the global model
    finetune_epochs: Natural = 5  # the original's

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state), train="body.")
        return self.report(site, {"loss": done.loss}), state | site.keeps()

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | overlay(server, mean_of(updates, uniform=self.weighting == "uniform"))

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        model = super().personalise(site, broadcast, state)
        if self.finetune == "none":
            return model
        fit(site, site.loss, train=TUNED[self.finetune], epochs=self.finetune_epochs)
        return site.model()
