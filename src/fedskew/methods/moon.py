"""MOON: Model-Contrastive Federated Learning.

Li, He, Song. CVPR 2021. arXiv:2103.16257

    l_con = -log( e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + e^{cos(z, z_prev)/tau}) )
    l     = l_sup + mu l_con
z is the body's output (the body of `simple-cnn` ends with the paper's projection). z_g comes from the received model,
z_prev from this client's own model at the end of its last round. Both are frozen, in evaluation mode.
Departure: in a client's first round there is no z_prev and l = l_sup (the authors' code does so in round 0 only; a
client that first takes part later gets a random net as z_prev).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedskew.core.method import Method, Paper, Update
from fedskew.core.net import Net, Seen
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative, Positive

PREVIOUS = {"previous": "parameters", "previous_buffers": "buffers"}  # where a client's state holds its last model


def model_contrast(z: Tensor, z_g: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """l_con, mean over the batch: -log(e^a / (e^a + e^b)) = log(1 + e^{b - a})."""
    return softplus((cosine_similarity(z, z_prev) - cosine_similarity(z, z_g)) / tau).mean()


@dataclass(frozen=True)
class MOON(Method):
    """Contrastive loss: a client's features stay near the global model's and move away from its own last model's."""

    paper = Paper(
        title="Model-Contrastive Federated Learning",
        authors="Li, He, Song",
        venue="CVPR 2021",
        link="arXiv:2103.16257",
    )
    formula = (
        r"L = L_{sup} - \mu \, \log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_{prev}) / "
        r"\tau}}"
    )
    terms_off = {"mu": 0.0}
    weak_where = {
        "two": "features are held near those of the received model, which slows training: mlp on digits, 10 rounds, "
        "82.9 % with mu = 1, 84.1 with 0.3, 84.6 with 0.1, FedAvg 85.0."
    }

    mu: NotNegative = setting(
        1.0,
        help="Weight of the contrastive loss; 0 gives FedAvg.",
        source="the authors' code, and the paper's for CIFAR-100 and Tiny-ImageNet; it has 5 for CIFAR-10",
        search=(0.1, 10.0),
    )
    tau: Positive = setting(0.5, help="Temperature of the contrastive loss.", source="the paper")

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if "previous" not in state:  # the client's first round, or mu = 0
            return site.loss
        received = site.frozen(broadcast, state).body
        previous = site.frozen({group: state[place] for place, group in PREVIOUS.items()}).body

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            z = net.body(x)
            with torch.no_grad():
                z_g, z_prev = received(x), previous(x)
            return site.loss(Seen(net, z), x, y) + self.mu * model_contrast(z, z_g, z_prev, self.tau)

        return loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, kept = super().client(site, broadcast, state)
        if self.mu == 0:
            return update, kept
        trained = site.model()
        return update, kept | {place: trained[group] for place, group in PREVIOUS.items()}
