"""FedExP: Speeding Up Federated Averaging via Extrapolation.

Jhunjhunwala, Wang, Joshi. ICLR 2023. arXiv:2301.09604

With D_i = y_i - x and D = sum_{i in S} p_i D_i, p_i = n_i / n:
    Eq. 6: eta = max(1, sum_i p_i |D_i|^2 / (2 (|D|^2 + epsilon))),  x <- x + eta D
The more the clients disagree, the longer the step. Long steps overshoot in turn to one side and the other, so the mean
of the last two x is evaluated and deployed, as in the paper; clients train from the last x. The server's `parameters`
are the mean, the group `iterate` is x, and a broadcast has both. A client sends |D_i|^2 beside its model, so the server
needs only means over clients. Buffers (batch-norm statistics) are averaged.
Departure: p_i weights by samples (the paper prints a uniform mean, the authors' code weights by samples).
Departure: after a step with eta = 1, which is FedAvg's, x itself is deployed.
Departure: epsilon is as in Eq. 6 (the authors' code multiplies it by the clients of a round and lowers it by 0.4 % a
round).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fedskew.core.method import MODEL, Method, Paper, Update, mean_of, model_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Positive

DRIFT, ITERATE = "drift", "iterate"  # groups of the payload: |D_i|^2; x


def square_norm(tensors: Tensors) -> torch.Tensor:
    """The squared norm of all entries together, in double precision."""
    return torch.stack([t.double().square().sum() for t in tensors.values()]).sum()


@dataclass(frozen=True)
class FedExP(Method):
    """FedAvg whose server goes further than the clients' mean when their updates disagree."""

    paper = Paper(
        title="Speeding Up Federated Averaging via Extrapolation",
        authors="Jhunjhunwala, Wang, Joshi",
        venue="ICLR 2023",
        link="arXiv:2301.09604",
    )
    formula = (
        r"D_i &= y_i - x, \qquad D = \sum_{i \in S} p_i D_i \\ "
        r"x &\leftarrow x + \eta D, \qquad \eta = \max\Bigl( 1, \, \frac{\sum_i p_i \lVert D_i \rVert^2}{2 (\lVert D "
        r"\rVert^2 + \epsilon)} \Bigr)"
    )
    terms_off = None  # the length of the step follows from the updates

    epsilon: Positive = setting(
        0.001,
        help="Keeps the step bounded when updates cancel; a large value gives FedAvg.",
        source="the authors' choice for three of four data sets",
        search=(0.0001, 0.1),
    )

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        return server | {ITERATE: server["parameters"]}

    def broadcast(self, server: Payload) -> Payload:
        return model_of(server) | {ITERATE: server[ITERATE]}

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, kept = super().client(site, broadcast | {"parameters": broadcast[ITERATE]}, state)
        drift = update.payload["parameters"] - broadcast[ITERATE]
        return update.plus(**{DRIFT: Tensors(square=square_norm(drift))}), kept

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        x, fresh = server[ITERATE], mean_of(updates, groups=(*MODEL, DRIFT))
        D, drift = fresh["parameters"] - x, fresh.pop(DRIFT)
        eta = float(drift["square"] / (2 * (square_norm(D) + self.epsilon)))
        averaged = server | overlay(server, fresh)
        if eta <= 1:
            return averaged | {ITERATE: averaged["parameters"]}
        return averaged | {ITERATE: x + D * eta, "parameters": x + D * (eta / 2)}
