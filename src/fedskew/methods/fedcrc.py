"""FedCRC: Federated Learning with Common Representation Learning Criterion and Personalized Predictor.

Wang, Xie, Yu, Qu, Zhang, Cao. Hohai University.

Eq. 4: f'   minimises CE(h_g(f(x)), y)                          over f, from f_g; h_g frozen
Eq. 5: h_i' minimises CE(h_i(z), y),  z = f'(x)                 over h_i, from its last value, at first h_g
Eq. 6: L_h = KL(softmax(h_i(z)) || softmax(h(z)))               the global predictor imitates the local one
Eq. 7: h_gi minimises CE(h(z), y) + L_h                         over h, from h_g; f', h_i frozen
Eq. 8: f_g = sum (n_i / n) f_i',  h' = sum (n_i / n) h_gi       n = sum of n_i over the cohort
Eq. 9: h_g <- tau h_g + (1 - tau) h'
Global model (f_g, h_g); personal model (f_g, h_i), with h_g for a client that has no h_i yet. h_i never leaves.
Reading: "5 epochs" are epochs of each step. Eq. 6 has the arguments in the order of torch's KLDivLoss.
Departure: without augmentation steps 2 and 3 see features that are computed once, in evaluation mode.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedskew.core.fit import fit
from fedskew.core.losses import imitation
from fedskew.core.method import Method, Update
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Natural

HEAD = "head."


@dataclass(frozen=True)
class FedCRC(Method):
    tau: Annotated[float, Meta(ge=0, le=1)] = 0.99  # the paper's; 0 is plain averaging, 1 never moves h_g
    epochs: tuple[Natural, Natural, Natural] | None = None  # of Eq. 4, 5 and 7; None: the training's (the paper's 5)
    kl: bool = True  # the paper's; False leaves L_h out of Eq. 7
    eval_refresh: bool = False  # True: before a test every client fits its h_i to the f_g it receives

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        extractor, local, shared = self.epochs or (None, None, None)
        site.load(state, broadcast)  # what was received lies over the client's own predictor
        first = fit(site, site.loss, train="body.", epochs=extractor)
        trained = site.model()  # f', h_g

        heads = on_features(site)
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
        heads = on_features(site)
        fit(heads, site.loss, train=HEAD, epochs=self.epochs and self.epochs[1])
        site.load(model, heads.model())
        return site.model()


def guided_loss(shared: Tensor, own: Tensor, y: Tensor) -> Tensor:
    """Eq. 7 of logits [batch, classes]; in logits its gradient is 2 p_shared - onehot(y) - p_own, over the batch."""
    return cross_entropy(shared, y) + imitation(shared, own)


def on_features(site: Site) -> Site:
    """The site seen from behind its body: a copy of the head as the net, features as the data.

    Names and losses hold as they are. It is the site itself where augmentation makes every pass's features
    different, or where there is nothing to see.
    """
    if site.training.augment or not len(site.data):
        return site
    # a copy, because a flat step would move the head's parameters out of the whole net's buffer
    net = Net(nn.Identity(), copy.deepcopy(site.net.head), site.net.features)
    features = site.infer(site.net.body)
    return replace(site, net=net, data=Data(features, site.data.labels, torch.arange(len(features))), spares=[])
