"""FedNTD: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning.

Lee, Jeong, Shin, Bae, Yun. NeurIPS 2022. arXiv:2106.03097

    L     = CE + beta L_NTD
    L_NTD = tau^2 KL( softmax_{c != y}(g / tau) || softmax_{c != y}(l / tau) ), batch mean
g are the logits of the model received (frozen, evaluation mode), l those of the model that trains.
The true class is left out before the softmax, so with two classes the term is 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.core.losses import decoupled
from fedskew.core.method import Method
from fedskew.core.net import Net
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative, Positive


def not_true(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """L_NTD: of decoupled distillation, the part without the target class."""
    return tau**2 * decoupled(student / tau, teacher / tau, y)[1].mean()


@dataclass(frozen=True)
class FedNTD(Method):
    beta: NotNegative = 1.0  # the original's
    tau: Positive = 1.0  # the original's configuration; its code's class has 3

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
