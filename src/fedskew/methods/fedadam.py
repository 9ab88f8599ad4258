"""FedAdam: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021. arXiv:2003.00295

Algorithm 2, with D = sum_{i in S} p_i y_i - x, p_i = n_i / n, element by element:
    m <- beta1 m + (1 - beta1) D
    v <- beta2 v + (1 - beta2) D^2
    x <- x + server_lr m / (sqrt(v) + tau),  v = tau^2 at the start, no correction of bias
Buffers (batch-norm statistics) are averaged as in FedAvg.
Departure: D is weighted by samples, as in the paper's experiments (Algorithm 2 prints a uniform mean).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.core.method import Method, Paper, Update
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Positive, Share
from fedskew.methods._shared.server_optimisers import AdaptiveStep


@dataclass(frozen=True)
class FedAdam(Method):
    """FedAvg whose server takes the step of Adam towards the clients' mean."""

    paper = Paper(
        title="Adaptive Federated Optimization",
        authors="Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan",
        venue="ICLR 2021",
        link="arXiv:2003.00295",
    )
    formula = (
        r"D &= \sum_{i \in S} p_i \, y_i - x, \qquad m \leftarrow \beta_1 m + (1 - \beta_1) D \\ "
        r"v &\leftarrow \beta_2 v + (1 - \beta_2) D^2 \\ "
        r"x &\leftarrow x + \eta_s \, \frac{m}{\sqrt{v} + \tau}"
    )
    terms_off = None  # each entry has a step size of its own
    weak_where = {
        "resnet8": "the server moves the model away from the clients' mean, whose batch-norm statistics it keeps: "
        "88.9 % on IID digits, 98.1 % with the statistics of the batch (FedAvg 95.8, 97.5).",
        "simple-cnn": "the cause is not known: on IID digits 91.5 % on validation samples, 88.1 with a smaller "
        "server_lr (0.01), FedAvg 95.2.",
    }

    server_lr: Positive = setting(
        0.03,
        help="Size of the server's step in each entry.",
        source="chosen on validation data (results/server-optimisers); the paper tunes it per task",
        search=(0.003, 0.3),
    )
    beta1: Share = setting(0.9, help="Momentum of the server; 0: none.", source="the paper")
    beta2: Share = setting(0.99, help="Share of the old v in the new one.", source="the paper")
    tau: Positive = setting(
        0.001, help="Adaptivity; entries that move much less than this per round take small steps.", source="the paper"
    )

    @property
    def optimiser(self) -> AdaptiveStep:
        """The server's step with these settings."""
        return AdaptiveStep(self.server_lr, self.beta1, self.tau)

    def init_server(self, site: Site) -> Payload:
        return self.optimiser.start(super().init_server(site))

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return self.optimiser.take(server, updates, lambda v, square: self.beta2 * v + (1 - self.beta2) * square)
