"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. arXiv:1602.05629

Algorithm 1: w_{t+1} = sum_{k in S_t} (n_k / n) w^k_{t+1},  n = sum of n_k over the cohort S_t
weighting=uniform gives every client of the cohort the weight 1/|S_t|: the control for methods that average so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.method import Method, Paper, Update, mean_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload


@dataclass(frozen=True)
class FedAvg(Method):
    """Averages the clients' models, weighted by their numbers of samples."""

    paper = Paper(
        title="Communication-Efficient Learning of Deep Networks from Decentralized Data",
        authors="McMahan, Moore, Ramage, Hampson, Aguera y Arcas",
        venue="AISTATS 2017",
        link="arXiv:1602.05629",
    )
    formula = r"w_{t+1} = \sum_{k \in S_t} \frac{n_k}{n} \, w^k_{t+1}, \qquad n = \sum_{k \in S_t} n_k"
    terms_off = {}

    weighting: Literal["samples", "uniform"] = setting(
        "samples", help="Weights of clients in the mean: by number of samples, or all equal.", source="the paper"
    )

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | overlay(server, mean_of(updates, uniform=self.weighting == "uniform"))
