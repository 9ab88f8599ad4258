"""FedBABU: Towards Enhanced Representation for Federated Image Classification.

Oh, Kim, Yun. ICLR 2022. arXiv:2106.06042

Algorithm 1, client: SGD on the body; the head keeps its random initial values, the same at all clients
Algorithm 1, server: body = mean of the cohort's bodies, by samples
Section 5: a client personalises the received model by fine-tuning it on its own data
The global model is (body, initial head), the one that FedCRC's table reports.
Departure: every site makes the head from the seed, so it is never sent.
Departure: fine-tuning uses the learning rate of the round.
Reading: the mean is by samples; in the authors' experiments all clients have equally many, and their code is uniform.
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

TUNED = {"head": "head.", "all": ""}  # prefixes of the parameters that fine-tuning moves


@dataclass(frozen=True)
class FedBABU(Method):
    """Trains and averages the body only; the head keeps its initial values until a client fine-tunes the model."""

    paper = Paper(
        title="FedBABU: Towards Enhanced Representation for Federated Image Classification",
        authors="Oh, Kim, Yun",
        venue="ICLR 2022",
        link="arXiv:2106.06042",
    )
    formula = (
        r"f_g = \sum_{i \in S} p_i \, f_i, \qquad f_i = \underset{f}{\mathrm{argmin}} \; \mathrm{CE}(h_0(f(x)), y), "
        r"\qquad h_0 \text{ fixed}"
    )
    terms_off = None  # the head never trains
    personal = ("head.",)
    weak_where = {"everywhere": "the global model's head is never trained; the personal models are what it is for."}

    weighting: Literal["samples", "uniform"] = setting(
        "samples",
        help="Weights of clients in the mean: by number of samples, or all equal.",
        source="as FedAvg and FedCRC, so that tables compare methods, not weights; the authors' code is uniform",
    )
    finetune: Literal["none", "head", "all"] = setting(
        "all",
        help="What a client fine-tunes for its personal model; none: it deploys the global one.",
        source="the paper",
    )
    finetune_epochs: Natural = setting(5, help="Epochs of fine-tuning.", source="the paper")

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
