"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.

Hsu, Qi, Brown. 2019. arXiv:1909.06335

Server momentum, with D = x - sum_{i in S} p_i y_i, the server's pseudo-gradient:
    heavy-ball   v <- beta v + D,              x <- x - server_lr v    (as in the paper)
    dampened     v <- beta v + (1 - beta) D,   x <- x - server_lr v
    nesterov     v <- beta v + D,              x <- x - server_lr (D + beta v)
The variants are not interchangeable: dampened starts with (1 - beta) of FedAvg's step.
Buffers (batch-norm statistics) have no velocity: plain mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedskew.core.method import Method, Update, mean_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Positive, Share


@dataclass(frozen=True)
class FedAvgM(Method):
    beta: Share = 0.9  # the original's choices are 0 to 0.997; FL-bench's pick
    server_lr: Positive = 1.0  # the original's
    variant: Literal["heavy-ball", "dampened", "nesterov"] = "heavy-ball"  # the original's

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
