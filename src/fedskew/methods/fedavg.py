"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. arXiv:1602.05629

Algorithm 1: w_{t+1} = sum_{k in S_t} (n_k / n) w^k_{t+1},  n = sum of n_k over the cohort S_t
weighting=uniform gives every client of the cohort 1/|S_t| instead: the control for methods that do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.method import Method, Update, mean_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload


@dataclass(frozen=True)
class FedAvg(Method):
    """`Method` is FedAvg: it answers every question the plain way."""

    weighting: Literal["samples", "uniform"] = "samples"  # the original's

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | overlay(server, mean_of(updates, uniform=self.weighting == "uniform"))
