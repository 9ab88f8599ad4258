"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama. ICLR 2021. arXiv:2111.04263

Algorithm 1, for the cohort S of N clients; g_i and h start at 0:
    client   y_i <- argmin_w f_i(w) - <g_i, w> / w_i + alpha/(2 w_i) |w - x|^2,   g_i <- g_i - alpha (y_i - x)
    server   h <- h - alpha/N sum_{i in S} (y_i - x),   x <- mean_{i in S} y_i - h / alpha
w_i is 1 in the paper (`weighting=uniform`), whose optimum is that of sum_i f_i. In the authors' code and here it is the
client's number of samples over the mean client's, which makes it the optimum over all samples, sum_i n_i f_i.
Departure: the mean number of samples is that of all updates so far; in the first round w_i is 1.
Departure: w_i is at least lr alpha, so that a step along the pull never overshoots.
Departure: x itself is evaluated (the authors' code evaluates the mean of the clients' models).
Buffers (batch-norm statistics) have no gradient, hence no correction: uniform mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.core.method import Method, Paper, Update, mean_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Positive
from fedskew.methods._shared.control_variates import (
    PLAIN_SGD,
    SAMPLES,
    WEIGHTING,
    WEIGHTING_SOURCE,
    Counted,
    Weighting,
    more_samples,
    no_samples,
    relative_size,
    tethered,
    tilted,
)


@dataclass(frozen=True)
class FedDyn(Method):
    """Regularises each client so that the clients' optima agree with that of the whole federation."""

    paper = Paper(
        title="Federated Learning Based on Dynamic Regularization",
        authors="Acar, Zhao, Matas, Mattina, Whatmough, Saligrama",
        venue="ICLR 2021",
        link="arXiv:2111.04263",
    )
    formula = (
        r"y_i &\leftarrow \underset{w}{\mathrm{argmin}} \; f_i(w) - \frac{1}{w_i} \langle g_i, w \rangle + "
        r"\frac{\alpha}{2 w_i} \lVert w - x \rVert^2, \qquad g_i \leftarrow g_i - \alpha (y_i - x) \\ "
        r"h &\leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (y_i - x), "
        r"\qquad x \leftarrow \underset{i \in S}{\mathrm{mean}} \; y_i - \frac{h}{\alpha}"
    )
    terms_off = None  # alpha divides the server's correction, so it cannot be 0
    meant = (PLAIN_SGD,)
    weak_where = {
        "resnet8": "the server moves the model away from the clients' mean, whose batch-norm statistics it keeps: "
        "67.9 % on IID digits, 96.9 % with the statistics of the batch (FedAvg 94.3, 96.1)."
    }

    alpha: Positive = setting(
        0.01,
        help="Weight of the regulariser; small values make the server's correction h / alpha large.",
        source="the example of the authors' code; the paper tries 0.1, 0.01, 0.001",
        search=(0.001, 0.3),
    )

    weighting: Weighting = setting("samples", help=WEIGHTING, source=WEIGHTING_SOURCE)

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        return server | {"h": server["parameters"].zeros()} | no_samples(self.weighting)

    def broadcast(self, server: Payload) -> Payload:
        return super().broadcast(server) | {group: server[group] for group in (SAMPLES,) if group in server}

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        w_i = relative_size(site, broadcast, self.alpha)
        return tilted(tethered(site.loss, broadcast["parameters"], self.alpha / w_i), state["gradient"] * (-1 / w_i))

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
        return server | overlay(server, fresh) | {"h": h} | more_samples(server, S)
