"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.

Hsu, Qi, Brown. Preprint, 2019. arXiv:1909.06335

Momentum on the server, with its pseudo-gradient D = x - sum_{i in S} p_i y_i, p_i = n_i / n:
    heavy-ball   v <- beta v + D,              x <- x - server_lr v    (as in the paper)
    dampened     v <- beta v + (1 - beta) D,   x <- x - server_lr v
    nesterov     v <- beta v + D,              x <- x - server_lr (D + beta v)
The variants are not interchangeable: dampened starts with (1 - beta) of FedAvg's step.
Buffers (batch-norm statistics) have no momentum: weighted mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.method import Method, Paper, Update, mean_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Positive, Share


@dataclass(frozen=True)
class FedAvgM(Method):
    """FedAvg with momentum on the server."""

    paper = Paper(
        title="Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        authors="Hsu, Qi, Brown",
        venue="Preprint, 2019",
        link="arXiv:1909.06335",
    )
    formula = (
        r"D &= x - \sum_{i \in S} p_i \, y_i \\ "
        r"v &\leftarrow \beta v + D, \qquad x \leftarrow x - \eta_s v"
    )
    terms_off = {"beta": 0.0}
    weak_where = {
        "resnet8": "the server moves the model away from the clients' mean, whose batch-norm statistics it keeps: "
        "73.8 % on IID digits, 97.1 % with the statistics of the batch (FedAvg 94.3, 96.1).",
        "simple-cnn": "momentum of 0.9 is long for 14 to 20 rounds: on IID digits 91.6 % on validation samples, 96.3 "
        "with beta = 0.5, FedAvg 95.2.",
        "cnn4 two": "the cause is not known: 92.3 % on digits, FedAvg 95.2; on validation samples 97.4, FedAvg 96.8.",
    }

    beta: Share = setting(
        0.9,
        help="Momentum of the server; 0 (with server_lr 1) gives FedAvg.",
        source="FL-bench's choice; the paper tries 0 to 0.997",
    )
    server_lr: Positive = setting(1.0, help="Learning rate of the server.", source="the paper", search=(0.1, 3.0))
    variant: Literal["heavy-ball", "dampened", "nesterov"] = setting(
        "heavy-ball", help="Form of momentum, see the equations.", source="the paper"
    )

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        return server | {"velocity": server["parameters"].zeros()}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if self.beta == 0 and self.server_lr == 1:  # x - (x - y) is y only up to rounding
            return super().aggregate(site, server, updates)
        x, fresh = server["parameters"], mean_of(updates)
        D = x - fresh["parameters"]
        v = server["velocity"] * self.beta + D * (1 - self.beta if self.variant == "dampened" else 1)
        step = D + v * self.beta if self.variant == "nesterov" else v
        return server | overlay(server, fresh) | {"parameters": x - step * self.server_lr, "velocity": v}
