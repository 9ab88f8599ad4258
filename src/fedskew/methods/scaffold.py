"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. arXiv:1910.06378

Algorithm 1:
    line 10   y <- y - lr (g_i(y) - c_i + c)
    line 12   option I: c_i+ <- g_i(x), over all samples;  option II: c_i+ <- c_i - c + (x - y) / (K lr)
    line 16   (dx, dc) <- mean over the cohort S of (y - x, c_i+ - c_i)
    line 17   x <- x + server_lr dx,   c <- c + |S|/N dc
All control variates start at 0; K counts steps, lr is that of the round.
Departure: under momentum, K is the number of plain steps that would have moved as far (see `division`).
Departure: option I computes its gradient without augmentation.
Buffers (batch-norm statistics) have no gradient, hence no control variate: mean only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedskew.core.fit import fit
from fedskew.core.method import MODEL, Method, Paper, Update, mean_of, overlay
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Mean, Payload, Tensors
from fedskew.core.training import Positive
from fedskew.methods._shared.control_variates import PLAIN_SGD, Counted, effective_steps, next_control, tilted


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Corrects each client's gradient by control variates: estimates of its own and of the mean gradient."""

    paper = Paper(
        title="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        authors="Karimireddy, Kale, Mohri, Reddi, Stich, Suresh",
        venue="ICML 2020",
        link="arXiv:1910.06378",
    )
    formula = (
        r"y_i &\leftarrow y_i - \eta \, (g_i(y_i) - c_i + c) \\ "
        r"c_i^+ &= c_i - c + \frac{x - y_i}{K \eta} \\ "
        r"x &\leftarrow x + \frac{\eta_s}{|S|} \sum_{i \in S} (y_i - x), "
        r"\qquad c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)"
    )
    terms_off = None  # the control variates have no weight; in the first round they are 0 and it is uniform FedAvg
    meant = (PLAIN_SGD,)

    server_lr: Positive = setting(1.0, help="Learning rate of the server.", source="the paper", search=(0.1, 2.0))
    option: Literal["I", "II"] = setting(
        "II",
        help="How a client renews its control variate: I, a gradient over all its samples; II, from its steps.",
        source="the paper's experiments",
    )
    division: Literal["momentum", "steps"] = setting(
        "momentum",
        help="K in option II under momentum: equivalent number of plain steps, or steps as counted. The same without.",
        source="FedNTD's code; without momentum both are the paper's",
    )
    weighting: Literal["uniform", "samples"] = setting(
        "uniform", help="Weights of clients in the means of line 16: all equal, or by samples.", source="the paper"
    )

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        return server | {"control": server["parameters"].zeros()}

    def broadcast(self, server: Payload) -> Payload:
        return super().broadcast(server) | {"control": server["control"]}

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return tilted(site.loss, broadcast["control"] - state["control"])  # line 10

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        x, c = broadcast["parameters"], broadcast["control"]
        state = state if "control" in state else {"control": c.zeros()} | state
        c_i = state["control"]
        at_x = gradient(site, broadcast, state) if self.option == "I" else None
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state))
        update = self.report(site, {"loss": done.loss})
        K = effective_steps(done.steps, site.training.momentum if self.division == "momentum" else 0)
        c_i_new = at_x or next_control(c_i, c, x - update.payload["parameters"], K * site.training.lr)
        return update.plus(control=c_i_new - c_i), state | site.keeps(self.personal) | {"control": c_i_new}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        x, S = server["parameters"], Counted(updates)
        fresh = mean_of(S, groups=(*MODEL, "control"), uniform=self.weighting == "uniform")
        c = server["control"] + fresh.pop("control") * (S.count / site.population)
        if self.server_lr != 1:  # x + (y - x) is y only up to rounding
            fresh["parameters"] = x + (fresh["parameters"] - x) * self.server_lr
        return server | overlay(server, fresh) | {"control": c}


def gradient(site: Site, *models: Payload) -> Tensors:
    """The gradient of the site's loss over all samples, at the given model. Leaves site.net in an unspecified state."""
    site.load(*models)
    total, named = Mean(), dict(site.net.named_parameters())

    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        value = site.loss(net, x, y)
        total.add(dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True)), len(y))
        return value.detach().requires_grad_()  # no graph behind it, so the gradient and the step are zero

    still = replace(site.training, optimiser="sgd", momentum=0.0, weight_decay=0.0, drop_last=False, augment="")
    fit(site, loss, epochs=1, training=still)
    return total.value()
