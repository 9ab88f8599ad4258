"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. arXiv:2102.07078

Algorithm 1, client: `head_epochs` on its own head, body frozen; then `body_epochs` on the body, head frozen
Algorithm 1, server: body = mean of the cohort's bodies
Departure: a frozen body keeps its batch-norm statistics (in the authors' code they move while the head trains).
Departure: each phase has a new optimiser, so neither momentum nor weight decay reaches a frozen part.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper, Update, mean_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural


@dataclass(frozen=True)
class FedRep(Method):
    """FedPer with two phases per round: first the client's own head, then the shared body."""

    paper = Paper(
        title="Exploiting Shared Representations for Personalized Federated Learning",
        authors="Collins, Hassani, Mokhtari, Shakkottai",
        venue="ICML 2021",
        link="arXiv:2102.07078",
    )
    formula = (
        r"h_i &\leftarrow \underset{h}{\mathrm{argmin}} \; f_i(\phi, h), "
        r"\qquad \phi_i \leftarrow \mathrm{argmin}_\phi \; f_i(\phi, h_i) \\ "
        r"\phi &\leftarrow \sum_{i \in S} p_i \, \phi_i"
    )
    terms_off = None  # heads are never averaged into a global model
    personal = ("head.",)
    has_global = False

    head_epochs: Natural = setting(
        4,
        help="Epochs over the head in each round.",
        source="FedCRC's 5 epochs as 4 + 1; the paper has 10 + 1 on CIFAR",
    )
    body_epochs: Natural = setting(1, help="Epochs over the body in each round.", source="the paper")
    test_epochs: Natural = setting(
        0,
        help="Epochs over the head before a client's model is evaluated; 0: none.",
        source="our choice; the authors' code has 10, at the end of the run",
    )
    weighting: Literal["uniform", "samples"] = setting(
        "uniform",
        help="Weights of clients in the mean: all equal, or by number of samples.",
        source="the paper; the authors' code weights FEMNIST by samples",
    )
    share_head_mean: bool = setting(
        False,
        help="True: heads are sent too, and a client without a head takes the mean of the last cohort's.",
        source="the paper; True is FedCRC's Table II",
    )

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
