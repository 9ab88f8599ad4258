"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. arXiv:2102.07078

Algorithm 1, client: tau_h epochs over its own head, body frozen; then tau_b epochs over the body, head frozen
Algorithm 1, server: body = mean of the cohort's bodies
Departure: a frozen body keeps its batch-norm statistics; in the authors' code they move in the head phase.
Departure: each phase has a fresh optimiser, so no momentum or weight decay reaches a frozen part.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update, mean_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural


@dataclass(frozen=True)
class FedRep(Method):
    personal = ("head.",)
    has_global = False

    head_epochs: Natural = 4  # FedCRC's 5 epochs as 4 + 1; the original has 10 + 1 on CIFAR
    body_epochs: Natural = 1  # the original's
    test_epochs: Natural = 0  # of the head, before a test; the authors' code: 10, at the end of the run
    weighting: Literal["uniform", "samples"] = "uniform"  # the original's; its code weights FEMNIST by samples
    share_head_mean: bool = False  # True: heads are sent, who has none takes the last cohort's mean; FedCRC's Table II

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        head = fit(site, site.loss, train="head.", epochs=self.head_epochs)
        body = fit(site, site.loss, train="body.", epochs=self.body_epochs)
        return self.report(site, {"loss": body.loss, "loss_head": head.loss}), state | site.keeps(self.personal)

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        kept_back = () if self.share_head_mean else self.personal
        return Update(site.shares(kept_back), float(len(site.data)), metrics)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | overlay(server, mean_of(updates, uniform=self.weighting == "uniform"))

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        model = super().personalise(site, broadcast, state)
        if self.test_epochs == 0:
            return model
        fit(site, site.loss, train="head.", epochs=self.test_epochs)
        return site.model()
