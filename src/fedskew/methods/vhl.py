"""VHL: Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated Learning.

Tang, Zhang, Shi, He, Han, Chu. ICML 2022. arXiv:2206.02465

    L = CE(M(x), y) + lambda_v CE(M(x'), y' + C) + lambda_c l_fa
    l_fa = SupCon over (f(x), y) and (f(x'), y'), f(x') constant, + 0.1 SupCon over f(x')
D' = {(x', y')} is a fixed set of labelled noise, the same at all sites.
M has 2C outputs: virtual classes are classes of their own and take part in the softmax of both cross entropies. The
model that is evaluated is M with its first C outputs. One pass of the body over x and x' together.
D' is the authors' Gaussian_Noise: for each class a mean from N(0, 1), samples from N(mean, 1/4), 8x8, bilinearly
enlarged, clamped to [0, 1], normalised as real images are. Data that are not images are neither clamped nor enlarged.
Omission: D' from an untrained StyleGAN, the paper's main choice.
Departure: D' is made from a seed at every site and is never sent.
Departure: features are aligned in every local epoch (the paper: in the first 5).
Departure: the outputs of virtual classes are one linear layer, whatever the head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedskew.core.fit import fit
from fedskew.core.losses import alignment
from fedskew.core.method import MODEL, Method, Paper, Update, mean_of, overlay
from fedskew.core.net import Net
from fedskew.core.settings import setting
from fedskew.core.site import Site, copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, NotNegative, Positive
from fedskew.methods._shared.heads import linear_start
from fedskew.methods._shared.virtual import endless_batches, new_seed, noise_set, virtual_labels

EXTRA, VIRTUAL = "extra", "virtual"  # groups of the payload: the layer of the virtual classes, the seed of D'


class WideHead(nn.Module):
    """A head with C more outputs, those of the virtual classes."""

    def __init__(self, head: nn.Module, extra: Tensors) -> None:
        super().__init__()
        self.head = head
        self.weight, self.bias = (nn.Parameter(copied(extra[name])) for name in ("weight", "bias"))

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.head(z), linear(z, self.weight, self.bias)], 1)

    def extra(self) -> Tensors:
        return Tensors(weight=copied(self.weight), bias=copied(self.bias))


@dataclass(frozen=True)
class VHL(Method):
    """Adds a fixed set of labelled noise images to every client's data and aligns real features with theirs."""

    paper = Paper(
        title="Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated Learning",
        authors="Tang, Zhang, Shi, He, Han, Chu",
        venue="ICML 2022",
        link="arXiv:2206.02465",
    )
    formula = (
        r"L &= \mathrm{CE}(M(x), y) + \lambda_v \, \mathrm{CE}(M(x'), y' + C) + \lambda_c \, l_{fa} \\ "
        r"l_{fa} &= \mathrm{SupCon}\bigl( (f(x), y), (f(x'), y') \bigr) + 0.1 \, \mathrm{SupCon}(f(x'), y')"
    )
    terms_off = {"lambda_c": 0.0, "lambda_v": 0.0}
    weak_where = {
        "iid": "part of each step goes to the virtual samples, so it is slower: cnn4 on digits 91.6 % on validation "
        "samples after 6 rounds, FedAvg 94.8; after 12 rounds 96.4 and 97.6."
    }

    lambda_v: NotNegative = setting(
        1.0, help="Weight of cross entropy on virtual samples; 0: off.", source="the paper", search=(0.1, 2.0)
    )
    lambda_c: NotNegative = setting(
        1.0, help="Weight of the feature alignment; 0: off.", source="the paper", search=(0.1, 20.0)
    )
    tau_c: Positive = setting(0.07, help="Temperature of the alignment.", source="the paper")
    n_v: Count = setting(64, help="Virtual samples per class.", source="FedPG's; the paper has 5000")
    virtual_batch: Count = setting(64, help="Virtual samples in each batch.", source="FedPG's; the paper has 128")

    @property
    def on(self) -> bool:
        """Whether virtual samples are used at all."""
        return bool(self.lambda_c or self.lambda_v)

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if not self.on:
            return server
        C, d = site.classes, site.net.features
        extra = Tensors(weight=linear_start((C, d), d, site.rng), bias=linear_start((C,), d, site.rng))
        return server | {EXTRA: extra, VIRTUAL: Tensors(seed=torch.tensor(new_seed(site.rng)))}

    def broadcast(self, server: Payload) -> Payload:
        return server

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        if not self.on:
            return super().client(site, broadcast, state)
        site.load(broadcast, state)
        head = WideHead(site.net.head, broadcast[EXTRA]).to(site.device)
        x_all = noise_set(site.data, site.classes, self.n_v, int(broadcast[VIRTUAL]["seed"])).to(site.device)
        y_all = virtual_labels(site.classes, self.n_v).to(site.device)
        virtual_batches = endless_batches(x_all, y_all, self.virtual_batch, site.rng)

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            x_v, y_v = next(virtual_batches)
            both = net.body(torch.cat([x, x_v]))
            z, z_v = both[: len(y)], both[len(y) :]
            total = site.loss(lambda _: net.head(z), x, y)
            if self.lambda_v:
                total = total + self.lambda_v * site.loss(lambda _: net.head(z_v), x_v, y_v + site.classes)
            if self.lambda_c:
                total = total + self.lambda_c * alignment(z, y, z_v, y_v, self.tau_c)
            return total

        done = fit(replace(site, net=Net(site.net.body, head, site.net.features)), loss)
        return self.report(site, {"loss": done.loss}).plus(**{EXTRA: head.extra()}), state | site.keeps()

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | overlay(server, mean_of(updates, groups=(*MODEL, EXTRA)))
