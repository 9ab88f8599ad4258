"""Fed-Focal Loss for Imbalanced Data Classification in Federated Learning.

Sarkar, Narang, Rai. FL-IJCAI 2020. arXiv:2011.06283

    L = -alpha (1 - p_y)^gamma log p_y, batch mean         (Lin et al., ICCV 2017, arXiv:1708.02002)
Departure: the loss alone, as in FedDDC's comparison (the paper also samples clients by their contribution).
Departure: one alpha for all classes.
"""

from dataclasses import dataclass

from torch import Tensor

from fedskew.core.method import Method, Paper
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative, Positive


def focal(logits: Tensor, y: Tensor, gamma: float, alpha: float) -> Tensor:
    """L. 1 - p_y is computed from the other logits, so that its gradient is finite where p_y rounds to 1."""
    own, everything = y[:, None], logits.logsumexp(1)
    log_p = logits.gather(1, own)[:, 0] - everything
    log_rest = logits.scatter(1, own, float("-inf")).logsumexp(1) - everything
    return -alpha * ((gamma * log_rest).exp() * log_p).mean()


@dataclass(frozen=True)
class FedFocal(Method):
    """FedAvg with the focal loss, which gives less weight to samples that are already classified well."""

    paper = Paper(
        title="Fed-Focal Loss for Imbalanced Data Classification in Federated Learning",
        authors="Sarkar, Narang, Rai",
        venue="FL-IJCAI 2020",
        link="arXiv:2011.06283",
    )
    formula = r"L = -\alpha \, (1 - p_y)^{\gamma} \, \log p_y"
    terms_off = {"gamma": 0.0, "alpha": 1.0}

    gamma: NotNegative = setting(
        2.0,
        help="Exponent of 1 - p_y; 0 (with alpha 1) is cross entropy.",
        source="Lin et al. (ICCV 2017)",
        search=(0.5, 5.0),
    )
    alpha: Positive = setting(
        1.0, help="Factor of the loss, the same for all classes.", source="the code of Ratio Loss; Lin et al. have 0.25"
    )

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if self.gamma == 0 and self.alpha == 1:
            return site.loss

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            return focal(net(x), y, self.gamma, self.alpha)

        return loss
