"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama. ICLR 2021. arXiv:2111.04263

Algorithm 1, for the cohort S of N clients; g_i and h start at 0:
    client   y_i <- argmin_w f_i(w) - <g_i, w> + alpha/2 |w - x|^2,   g_i <- g_i - alpha (y_i - x)
    server   h <- h - alpha/N sum_{i in S} (y_i - x),   x <- mean_{i in S} y_i - h / alpha
Departure: one alpha for all clients (the authors' code divides it by the client's share of the samples).
Departure: x itself is evaluated (the authors' code evaluates the mean of the clients' models).
Buffers (batch-norm statistics) have no gradient, hence no correction: plain mean, uniform as the parameters'.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.core.method import Method, Update, mean_of, overlay
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Positive
from fedskew.methods._shared.control_variates import Counted, tethered, tilted


@dataclass(frozen=True)
class FedDyn(Method):
    alpha: Positive = 0.01  # the original's choices are 0.1, 0.01, 0.001; the example of its code

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        return server | {"h": server["parameters"].zeros()}

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tilted(tethered(site.loss, broadcast["parameters"], self.alpha), state["gradient"] * -1)

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        x = broadcast["parameters"]
        update, state = super().client(site, broadcast, {"gradient": x.zeros()} | state)
        g_i = state["gradient"] - (update.payload["parameters"] - x) * self.alpha
        return update, state | {"gradient": g_i}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        S = Counted(updates)
        fresh = mean_of(S, uniform=True)
        moved = fresh["parameters"] - server["parameters"]
        h = server["h"] - moved * (self.alpha * S.count / site.population)
        fresh["parameters"] = fresh["parameters"] - h / self.alpha
        return server | overlay(server, fresh) | {"h": h}
