"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022. arXiv:2105.00243

    L   = CE + lambda d(z, P_y), P the server's prototypes; before there are any, CE alone
    P_c = mean over the clients that hold c of their own mean feature of c
Only prototypes are sent, no model; a client predicts with its own net.
As in the authors' code: d is the mean square over all elements of the batch, the mean over clients is uniform, and a
sample whose class has no prototype adds 0 to the batch's mean.
Departure: prototypes are those of the trained model, in evaluation mode (the authors' code: of the last epoch's
batches, while the model still changes).
Departure: a class that no client of the cohort holds keeps its last prototype (in the paper all clients take part).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedskew.core.method import Method, Paper, Update
from fedskew.core.net import Net, Seen
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative
from fedskew.methods._shared.prototypes import GROUP, PrototypeMean, no_prototypes, prototypes_of

Distance = Literal["mse", "l2"]


def to_prototype(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, distance: Distance) -> Tensor:
    """d(z, P_y), mean over the batch; a sample whose class has no prototype adds 0."""
    target = torch.where(known[y][:, None], prototypes[y], z.detach())
    return mse_loss(z, target) if distance == "mse" else (z - target).norm(dim=1).mean()


@dataclass(frozen=True)
class FedProto(Method):
    """Clients share class prototypes instead of models and keep their own nets."""

    paper = Paper(
        title="FedProto: Federated Prototype Learning across Heterogeneous Clients",
        authors="Tan, Long, Liu, Zhou, Lu, Jiang, Zhang",
        venue="AAAI 2022",
        link="arXiv:2105.00243",
    )
    formula = (
        r"L = \mathrm{CE} + \lambda \, d(z, P_y), \qquad P_c = \underset{i \text{ has } c}{\mathrm{mean}} \; "
        r"\underset{z \in Z_{ic}}{\mathrm{mean}} \; z"
    )
    terms_off = None  # with lam = 0 every client trains alone: Local
    personal = ("",)  # every name
    has_global = False

    lam: NotNegative = setting(
        1.0,
        help="Weight of the distance to prototypes; 0: each client alone.",
        source="the authors' code",
        search=(0.1, 10.0),
    )
    distance: Distance = setting(
        "mse",
        help="d(z, P_y): mse, the mean square over features; l2, the Euclidean norm.",
        source="the authors' code; the paper writes l2",
    )
    weighting: Literal["uniform", "samples"] = setting(
        "uniform",
        help="Weights of clients in the mean of prototypes: all equal, or by samples of the class.",
        source="the authors' code; the paper weights by samples",
    )

    def init_server(self, site: Site) -> Payload:
        return {GROUP: no_prototypes(site)}

    def broadcast(self, server: Payload) -> Payload:
        return server

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        P, known = broadcast[GROUP]["mean"].to(site.device), (broadcast[GROUP]["count"] > 0).to(site.device)
        if self.lam == 0 or not known.any():
            return site.loss

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            z = net.body(x)
            return site.loss(Seen(net, z), x, y) + self.lam * to_prototype(z, y, P, known, self.distance)

        return loss

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        return Update({GROUP: prototypes_of(site)}, float(len(site.data)), metrics)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        pool = PrototypeMean(server[GROUP], uniform=self.weighting == "uniform")
        for update in updates:
            pool.add(update.payload[GROUP])
        return {GROUP: pool.value()}
