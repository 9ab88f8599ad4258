"""FedNTD: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning.

Lee, Jeong, Shin, Bae, Yun. NeurIPS 2022. arXiv:2106.03097

    L     = CE + beta L_NTD
    L_NTD = tau^2 KL( softmax_{c != y}(g / tau) || softmax_{c != y}(l / tau) ), batch mean
g are the logits of the received model (frozen, in evaluation mode), l those of the model in training.
The true class is left out before the softmax, so with two classes the term is 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.core.losses import decoupled
from fedskew.core.method import Method, Paper
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative, Positive


def not_true(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """L_NTD: the NCKD part of decoupled distillation."""
    return tau**2 * decoupled(student / tau, teacher / tau, y)[1].mean()


@dataclass(frozen=True)
class FedNTD(Method):
    """Distils the global model into each client on all classes but the true one, so that they are not forgotten."""

    paper = Paper(
        title="Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
        authors="Lee, Jeong, Shin, Bae, Yun",
        venue="NeurIPS 2022",
        link="arXiv:2106.03097",
    )
    formula = (
        r"L = \mathrm{CE} + \beta \tau^2 \, \mathrm{KL}\Bigl( \underset{c \ne y}{\mathrm{softmax}} (g / \tau) \,\|\, "
        r"\underset{c \ne y}{\mathrm{softmax}} (l / \tau) \Bigr)"
    )
    terms_off = {"beta": 0.0}
    weak_where = {
        split: "the global model is distilled on the classes that are not true, and it is poor in early rounds: "
        f"{ours} % with {net} on digits, FedAvg {fedavg}."
        for split, net, ours, fedavg in (("two", "an mlp", 85.9, 91.5), ("dirichlet", "simple-cnn", 91.8, 95.6))
    }

    beta: NotNegative = setting(
        1.0, help="Weight of the distillation loss; 0 gives FedAvg.", source="the paper", search=(0.1, 3.0)
    )
    tau: Positive = setting(
        1.0,
        help="Temperature of the distillation.",
        source="the authors' configuration; the class in their code has 3",
        search=(0.5, 5.0),
    )

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if self.beta == 0:
            return site.loss
        received = site.frozen(broadcast, state)

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            logits = net(x)
            with torch.no_grad():
                teacher = received(x)
            return site.loss(lambda _: logits, x, y) + self.beta * not_true(logits, teacher, y, self.tau)

        return loss
