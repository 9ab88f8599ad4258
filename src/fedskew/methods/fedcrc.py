"""FedCRC: Federated Learning with Common Representation Learning Criterion and Personalized Predictor.

Wang, Xie, Yu, Qu, Zhang, Cao. Hohai University

Eq. 4: f'   minimises CE(h_g(f(x)), y)                          over f, from f_g; h_g frozen
Eq. 5: h_i' minimises CE(h_i(z), y),  z = f'(x)                 over h_i, from its last value, at first h_g
Eq. 6: L_h = KL(softmax(h_i(z)) || softmax(h(z)))               the global predictor imitates the local one
Eq. 7: h_gi minimises CE(h(z), y) + L_h                         over h, from h_g; f', h_i frozen
Eq. 8: f_g = sum (n_i / n) f_i',  h' = sum (n_i / n) h_gi       n = sum of n_i over the cohort
Eq. 9: h_g <- tau h_g + (1 - tau) h'
The global model is (f_g, h_g), the personal one (f_g, h_i), with h_g until the client has an h_i. h_i is never sent.
Departure: h_i is fitted to f_g by Eq. 5 before a client uses its model (`eval_refresh=false`: it is not).
Reading: "5 epochs" are epochs of each step.
Reading: the paper's split is dirichlet, class by class over clients; its text may also mean dirichlet-mix.
Reading: Eq. 6 prints its arguments in the order of torch's KLDivLoss.
Departure: without augmentation, Eq. 5 and 7 use features that are computed once, in evaluation mode.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.core.fit import fit
from fedskew.core.losses import imitation
from fedskew.core.method import Method, Paper, Update
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Natural

HEAD = "head."


@dataclass(frozen=True)
class FedCRC(Method):
    """Trains a shared body, a personal head and a slowly moving global head one after the other."""

    paper = Paper(
        title="Federated Learning with Common Representation Learning Criterion and Personalized Predictor",
        authors="Wang, Xie, Yu, Qu, Zhang, Cao",
        venue="Hohai University",
    )
    formula = (
        r"f' &= \underset{f}{\mathrm{argmin}} \; \mathrm{CE}(h_g(f(x)), y), "
        r"\qquad h_i' = \underset{h}{\mathrm{argmin}} \; \mathrm{CE}(h(z), y), \qquad z = f'(x) \\ "
        r"h_{gi} &= \underset{h}{\mathrm{argmin}} \; \mathrm{CE}(h(z), y) + \mathrm{KL}\bigl( \mathrm{softmax}\, "
        r"h_i'(z) \,\|\, \mathrm{softmax}\, h(z) \bigr) \\ "
        r"f_g &\leftarrow \sum_i \frac{n_i}{n} f_i', \qquad h_g \leftarrow \tau h_g + (1 - \tau) \sum_i \frac{n_i}{n} "
        r"h_{gi}"
    )
    terms_off = None  # body and heads always train one after the other
    weak_where = {
        "everywhere": "the global head moves by 1 - tau (1 %) a round, so short runs end with the initial one."
    }

    tau: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.99, help="Share of the old h_g in Eq. 9; 0: plain averaging, 1: h_g never moves.", source="the paper"
    )
    epochs: tuple[Natural, Natural, Natural] | None = setting(
        None, help="Epochs of Eq. 4, 5 and 7; None: those of the training.", source="the paper, which trains 5 epochs"
    )
    kl: bool = setting(True, help="Add L_h to Eq. 7; False: cross entropy alone.", source="the paper")
    eval_refresh: bool = setting(
        True,
        help="A client fits its h_i to the received f_g before it uses its model, also one that never trained; "
        "False: h_i is used as it is, fitted to the f' of its last round.",
        source="results/fedcrc-refresh; False is the paper's, where nothing is said of a last fit",
    )

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        extractor, local, shared = self.epochs or (None, None, None)
        site.load(state, broadcast)  # the received h_g takes precedence over the client's h_i
        first = fit(site, site.loss, train="body.", epochs=extractor)
        trained = site.model()  # f', h_g

        heads = site.head_only()
        heads.load(trained, {"parameters": state.get("parameters", Tensors())})
        second = fit(heads, site.loss, train=HEAD, epochs=local)
        own = heads.parameters().split(HEAD)[1]
        h_i = copy.deepcopy(heads.net.head).eval().requires_grad_(False)

        def guided(net: Net, x: Tensor, y: Tensor) -> Tensor:
            z = net.body(x)
            return guided_loss(net.head(z), h_i(z), y)

        heads.load(trained)
        third = fit(heads, guided if self.kl else site.loss, train=HEAD, epochs=shared)
        site.load(trained, heads.model())  # f', h_gi
        metrics = {"loss": first.loss, "loss_local": second.loss, "loss_global": third.loss}
        return self.report(site, metrics), state | site.keeps() | {"parameters": own}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        averaged = super().aggregate(site, server, updates)
        if self.tau == 0:
            return averaged
        old, new = (model["parameters"].split(HEAD)[1] for model in (server, averaged))
        h_g = self.tau * old + (1 - self.tau) * new
        return averaged | {"parameters": averaged["parameters"] | h_g}

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        model = super().personalise(site, broadcast, state)
        if not self.eval_refresh:
            return model
        heads = site.head_only()
        fit(heads, site.loss, train=HEAD, epochs=self.epochs and self.epochs[1])
        site.load(model, heads.model())
        return site.model()


def guided_loss(shared: Tensor, own: Tensor, y: Tensor) -> Tensor:
    """Eq. 7 of logits [batch, classes]: of h (`shared`) and of h_i (`own`)."""
    return cross_entropy(shared, y) + imitation(shared, own)
