"""CReFF: Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated Features.

Shang, Lu, Huang, Wang. IJCAI 2022. arXiv:2204.13399

Two models share a body: FedAvg's, which clients train, and the one that is evaluated and deployed, whose head is
re-trained on federated features. The server's `parameters` are the second; the group `trained` is FedAvg's head.
    client: g_c = gradient, with respect to the re-trained head, of the mean CE of its samples of class c; then FedAvg
    server: g_c = uniform mean over the clients that have class c
            features h [C, n, d] minimise sum_c D(g_c, gradient of the mean CE of h_c), over classes that a client has;
            D = sum of 1 - cos over the rows of the weight, with the bias as one more row;  SGD, `match` steps
            a new head is trained on h with CE;  SGD, `epochs`
A broadcast carries one more head, an update C heads and C counts: dense, so that all updates have one shape.
Departure: g_c is over all samples of the class (the authors' code: ten draws of up to 32, augmented).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import linear, one_hot, pad

from fedskew.core.fast.linear import descend, is_linear
from fedskew.core.fit import fit
from fedskew.core.losses import plain
from fedskew.core.method import Method, Paper, Update, model_of
from fedskew.core.samples import Data
from fedskew.core.settings import UsageError, setting
from fedskew.core.site import Site, copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, Positive, Training
from fedskew.methods._shared.heads import HEAD, TRAINED, as_trained, deploy_head
from fedskew.methods._shared.prototypes import PrototypeMean, enough

FEATURES, GRADIENTS = "features", "gradients"  # groups of the payload
EPSILON = 1e-6  # of the authors' code: a row of zeros has cosine 0


def head_of(model: Payload) -> Tensors:
    """The parameters of a model's head, named as in the head itself."""
    return Tensors({name.removeprefix(HEAD): t for name, t in model["parameters"].split(HEAD)[1].items()})


def errors(h: Tensor, y: Tensor, head: Tensors) -> Tensor:
    """p - e_y: the gradient of each sample's CE with respect to its logits."""
    return linear(h, head["weight"], head.get("bias")).softmax(-1) - one_hot(y, len(head["weight"]))


def with_ones(h: Tensor, head: Tensors) -> Tensor:
    """Features with a column of ones if the head has a bias, which is the weight of that column."""
    return pad(h, (0, 1), value=1.0) if "bias" in head else h


def gradients(h: Tensor, y: Tensor, head: Tensors) -> Tensors:
    """g_c of every class as `mean` [C, C (d + 1)], the mean of (p - e_c) h^T; `count` [C] is its samples."""
    C, n = len(head["weight"]), len(y)
    spread = h.new_zeros(n, C, C).index_put((torch.arange(n), y), errors(h, y, head))  # in the rows of its class
    count = torch.bincount(y, minlength=C)
    total = (spread.flatten(1).T @ with_ones(h, head)).view(C, -1)
    return Tensors(mean=total / count.clamp(min=1)[:, None], count=count.float())


def federated(h: Tensor, head: Tensors) -> Tensor:
    """The gradients [C, C (d + 1)] of federated features [C, n, d]."""
    C, n, _ = h.shape
    y = torch.arange(C, device=h.device)[:, None].expand(C, n)
    made: Tensor = errors(h, y, head).mT @ with_ones(h, head)
    return made.flatten(1) / n


def mismatch(real: Tensor, made: Tensor, d: int) -> Tensor:
    """D, summed over classes; both gradients are [C, C (d + 1)]. It is constant where one of them is 0."""
    a, b = (g.view(len(g), len(g), -1) for g in (real, made))

    def distance(a: Tensor, b: Tensor) -> Tensor:
        lengths: Tensor = vector_norm(a, dim=-1) * vector_norm(b, dim=-1)
        return (1 - (a * b).sum(-1) / (lengths + EPSILON)).sum()

    return distance(a[..., :d], b[..., :d]) + distance(a[..., d:].mT, b[..., d:].mT)


class Features(nn.Module):
    """Federated features as trainable parameters."""

    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.h = nn.Parameter(h.clone())


@dataclass(frozen=True)
class CReFF(Method):
    """Re-trains the deployed head on features that reproduce the clients' head gradients."""

    paper = Paper(
        title="Federated Learning on Heterogeneous and Long-Tailed Data "
        "via Classifier Re-Training with Federated Features",
        authors="Shang, Lu, Huang, Wang",
        venue="IJCAI 2022",
        link="arXiv:2204.13399",
    )
    formula = (
        r"g_c &= \text{mean over the clients that have } c \text{ of } \nabla_h \, \mathrm{CE}_c \\ "
        r"H &\leftarrow \underset{H}{\mathrm{argmin}} \; \sum_c \sum_r \bigl( 1 - \cos(g_{c,r}, \nabla_{h_r} "
        r"\mathrm{CE}(h(H_c), c)) \bigr) \\ "
        r"h &\leftarrow \underset{h}{\mathrm{argmin}} \; \mathrm{CE} \text{ on } H"
    )
    terms_off = {"per_class": 0}
    quick = {"match": 3, "epochs": 2}
    weak_where = {
        split: "the head is trained on federated features, which start as noise and are matched a little each round: "
        f"after 10 rounds with an mlp on digits {ours} %, FedAvg's head on the same body {fedavg} %."
        for split, ours, fedavg in (("iid", 92.4, 96.2), ("two", 80.5, 86.4))
    } | {"dirichlet": "as for iid: 92.9 % with simple-cnn on digits, FedAvg 95.6."}

    per_class: Natural = setting(100, help="Federated features per class; 0 gives FedAvg.", source="the paper")
    match: Natural = setting(100, help="Gradient-matching steps on the features per round.", source="the paper")
    match_lr: Positive = setting(0.1, help="Learning rate of the matching.", source="the paper")
    epochs: Natural = setting(300, help="Epochs of the head over the features in each round.", source="the paper")
    lr: Positive = setting(0.01, help="Learning rate of the head.", source="the paper", search=(1e-3, 0.1))
    batch: Count = setting(32, help="Batch size of the head.", source="the paper")

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if not self.per_class:
            return server
        if not isinstance(site.net.head, nn.Linear):
            raise UsageError("creff needs a model whose head is one linear layer, such as simple-cnn.")
        h = torch.randn(site.classes, self.per_class, site.net.features, generator=site.rng)
        return deploy_head(server, HEAD, self.new_head(site)) | {FEATURES: Tensors(h=h)}

    def broadcast(self, server: Payload) -> Payload:
        return model_of(server) | {group: server[group] for group in (TRAINED,) if group in server}

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        if not self.per_class:
            return super().client(site, broadcast, state)
        site.load(broadcast, state)
        g = gradients(site.infer(site.net.body), site.data.labels, head_of(broadcast))
        update, state = super().client(site, as_trained(broadcast), state)
        return update.plus(**{GRADIENTS: enough(g, site.min_count)}), state

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if not self.per_class:
            return super().aggregate(site, server, updates)
        h, head = server[FEATURES]["h"], head_of(server)
        none = torch.zeros(site.classes, site.classes * with_ones(h, head).shape[-1])
        pool = PrototypeMean(Tensors(mean=none, count=torch.zeros(site.classes)), uniform=True)

        def noted() -> Iterator[Update]:  # a stream can be read only once
            for update in updates:
                pool.add(update.payload[GRADIENTS])
                yield update

        fresh = super().aggregate(site, server, noted())
        h = self.matched(site, h, head, pool.value()["mean"])
        return deploy_head(fresh, HEAD, self.retrained(site, h)) | {FEATURES: Tensors(h=h)}

    def matched(self, site: Site, h: Tensor, head: Tensors, g: Tensor) -> Tensor:
        """The federated features after this round's steps; those of a class that no client has (g_c = 0) stay."""

        def loss(net: Features, x: Tensor, y: Tensor) -> Tensor:
            return mismatch(g, federated(net.h, head), h.shape[2])

        row = Data(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        features = Features(h)
        server_site = replace(site, net=features, data=row, device="cpu")
        fit(server_site, loss, steps=self.match, training=Training(lr=self.match_lr, batch_size=1))
        return copied(features.h)

    def retrained(self, site: Site, h: Tensor) -> Tensors:
        """The parameters of a new head trained on the federated features, named as in the net."""
        C, n, _ = h.shape
        data = Data(h.flatten(0, 1), torch.arange(C).repeat_interleave(n), torch.arange(C * n))
        heads = site.head_only(data)
        heads.load({"parameters": self.new_head(site)})
        if site.fast and site.device == "cpu" and site.loss is plain and is_linear(heads.net):
            descend(heads.net, data, site.rng, epochs=self.epochs, lr=self.lr, batch=self.batch)
        else:
            fit(heads, site.loss, epochs=self.epochs, training=Training(lr=self.lr, batch_size=self.batch))
        return heads.parameters()

    @staticmethod
    def new_head(site: Site) -> Tensors:
        """Initial parameters of a head, distributed as nn.Linear's, named as in the net."""
        shapes = {f"{HEAD}{name}": t.shape for name, t in site.net.head.named_parameters()}
        bound = site.net.features**-0.5  # not `linear_start`: dividing rounds differently, results would change
        return Tensors({n: (torch.rand(s, generator=site.rng) * 2 - 1) * bound for n, s in shapes.items()})
