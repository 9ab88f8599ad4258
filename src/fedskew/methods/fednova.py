"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. arXiv:2007.07481

Normalised averaging, with |a_i| the effective number of local steps, p_i = n_i / sum_{j in S} n_j:
    d_i = (x - y_i) / |a_i|                            (it carries the learning rate)
    x <- x - tau_eff sum_i p_i d_i
    |a_i|: K steps of plain SGD: K;  momentum rho: [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho);
           proximal local objective: sum_{j < K} (1 - lr mu)^j
    tau_eff = sum_i p_i |a_i|, with mu > 0: sum_i p_i K_i (as in the authors' code)
Departure: with both momentum and mu, |a_i| is that of the combined recursion (the authors' code counts both).
Departure: no server momentum.
A client sends d_i (the group `direction`) and its tau_i, not its model: the server needs only their sums.
Buffers (batch-norm statistics) are not rescaled: weighted mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fedskew.core.fit import fit
from fedskew.core.method import Meant, Method, Paper, Update, mean_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import NotNegative
from fedskew.methods._shared.control_variates import effective_steps, is_sgd, tethered

DIRECTION, STEPS = "direction", "steps"  # groups of the payload: d_i, and tau_i


@dataclass(frozen=True)
class FedNova(Method):
    """Normalises each client's change by its number of local steps before averaging."""

    paper = Paper(
        title="Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        authors="Wang, Liu, Liang, Joshi, Poor",
        venue="NeurIPS 2020",
        link="arXiv:2007.07481",
    )
    formula = (
        r"x \leftarrow x - \tau_{eff} \sum_{i \in S} p_i \, \frac{x - y_i}{\lVert a_i \rVert_1}, "
        r"\qquad \tau_{eff} = \sum_{i \in S} p_i \lVert a_i \rVert_1"
    )
    terms_off = None  # where all clients take the same number of steps it is FedAvg up to rounding
    meant = (Meant("SGD, with or without momentum", "the number of steps is not counted for Adam", is_sgd),)
    weak_where = {"dirichlet": "an update is divided by its steps, so clients with few samples count far too much."}

    mu: NotNegative = setting(
        0.0, help="Weight of |w - x|^2 / 2 in each client's loss; 0: no proximal term.", source="the authors' code"
    )

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tethered(site.loss, broadcast["parameters"], self.mu)

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state))
        a = effective_steps(done.steps, site.training.momentum, site.training.lr * self.mu)
        update, x = self.report(site, {"loss": done.loss}), broadcast["parameters"]
        y = update.payload["parameters"]
        sent = {group: tensors for group, tensors in update.payload.items() if group != "parameters"}
        sent[DIRECTION] = (x.like(y) - y) / (a or 1.0)  # a client that took no step has not moved
        sent[STEPS] = Tensors(tau=torch.tensor(float(done.steps) if self.mu else a, dtype=torch.float64))
        return replace(update, payload=sent), state | site.keeps(self.personal)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        fresh = mean_of(updates, groups=("buffers", DIRECTION, STEPS))
        tau_eff, d = float(fresh.pop(STEPS)["tau"]), fresh.pop(DIRECTION)
        fresh["parameters"] = server["parameters"].like(d) - d * tau_eff
        return server | overlay(server, fresh)
