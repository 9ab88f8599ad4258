"""CReFF: Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated Features.

Shang, Lu, Huang, Wang. IJCAI 2022. arXiv:2204.13399

Two models share a body: FedAvg's, from which clients train; and the one that is tested and deployed, with a head
re-trained on federated features. The server's `parameters` are the second, the group `trained` is FedAvg's head.
    client: g_c = gradient, in the re-trained head received, of the mean CE of its samples of class c; then FedAvg
    server: g_c = plain mean over the clients that have class c
            features h [C, n, d] minimise sum_c D(g_c, gradient of the mean CE of h_c), over the classes somebody has;
            D = sum over rows of the weight, and the bias as one more row, of 1 - cos;  SGD, `match` steps
            a fresh head is trained on h with CE;  SGD, `epochs`
It costs a head a broadcast, C heads and C counts an update: dense, so that all clients' have one shape.
Departure: g_c is of all samples of the class (the code: ten draws of up to 32, augmented).
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import linear, one_hot, pad

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update, model_of
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.settings import UsageError
from fedskew.core.site import Site, copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, Positive, Training
from fedskew.methods._shared.prototypes import Pool
from fedskew.methods.taunorm import as_trained

FEATURES, GRADIENTS, TRAINED = "features", "gradients", "trained"  # groups of the payload
HEAD = "head."
EPSILON = 1e-6  # the original's code's: a row of zeros has cosine 0


def head_of(model: Payload) -> Tensors:
    return Tensors({name.removeprefix(HEAD): t for name, t in model["parameters"].split(HEAD)[1].items()})


def errors(h: Tensor, y: Tensor, head: Tensors) -> Tensor:
    """p - e_y: the gradient of a sample's CE in its logits."""
    return linear(h, head["weight"], head.get("bias")).softmax(-1) - one_hot(y, len(head["weight"]))


def with_ones(h: Tensor, head: Tensors) -> Tensor:
    """Features as the head's parameters see them: the bias is the weight of a feature that is always 1."""
    return pad(h, (0, 1), value=1.0) if "bias" in head else h


def gradients(h: Tensor, y: Tensor, head: Tensors) -> Tensors:
    """g_c of every class, [C, C (d + 1)], by sum (p - e_c) h^T; `count` [C] its samples."""
    C, n = len(head["weight"]), len(y)
    spread = h.new_zeros(n, C, C).index_put((torch.arange(n), y), errors(h, y, head))  # in the rows of its class
    count = torch.bincount(y, minlength=C)
    total = (spread.flatten(1).T @ with_ones(h, head)).view(C, -1)
    return Tensors(mean=total / count.clamp(min=1)[:, None], count=count.float())


def federated(h: Tensor, head: Tensors) -> Tensor:
    """The same of federated features [C, n, d]."""
    C, n, _ = h.shape
    y = torch.arange(C, device=h.device)[:, None].expand(C, n)
    made: Tensor = errors(h, y, head).mT @ with_ones(h, head)
    return made.flatten(1) / n


def mismatch(real: Tensor, made: Tensor, d: int) -> Tensor:
    """D, summed over classes; [C, C (d + 1)] each. Where one of them is 0 it is constant."""
    a, b = (g.view(len(g), len(g), -1) for g in (real, made))

    def apart(a: Tensor, b: Tensor) -> Tensor:
        lengths: Tensor = vector_norm(a, dim=-1) * vector_norm(b, dim=-1)
        return (1 - (a * b).sum(-1) / (lengths + EPSILON)).sum()

    return apart(a[..., :d], b[..., :d]) + apart(a[..., d:].mT, b[..., d:].mT)


class Features(nn.Module):
    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.h = nn.Parameter(h.clone())


@dataclass(frozen=True)
class CReFF(Method):
    per_class: Natural = 100  # the original's; 0: FedAvg
    match: Natural = 100  # the original's
    match_lr: Positive = 0.1  # the original's
    epochs: Natural = 300  # the original's
    lr: Positive = 0.01  # the original's
    batch: Count = 32  # the original's

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if not self.per_class:
            return server
        if not isinstance(site.net.head, nn.Linear):
            raise UsageError("creff needs a net whose head is one linear layer, such as simple-cnn.")
        h = torch.randn(site.classes, self.per_class, site.net.features, generator=site.rng)
        return self.deployed(server, self.fresh_head(site)) | {FEATURES: Tensors(h=h)}

    def broadcast(self, server: Payload) -> Payload:
        return model_of(server) | {group: server[group] for group in (TRAINED,) if group in server}

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        if not self.per_class:
            return super().client(site, broadcast, state)
        site.load(broadcast, state)
        g = gradients(site.infer(site.net.body), site.data.labels, head_of(broadcast))
        update, state = super().client(site, as_trained(broadcast), state)
        return update.plus(**{GRADIENTS: g}), state

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if not self.per_class:
            return super().aggregate(site, server, updates)
        h, head = server[FEATURES]["h"], head_of(server)
        none = torch.zeros(site.classes, site.classes * with_ones(h, head).shape[-1])
        pool = Pool(Tensors(mean=none, count=torch.zeros(site.classes)), uniform=True)

        def noted() -> Iterator[Update]:  # a stream is read only once
            for update in updates:
                pool.add(update.payload[GRADIENTS])
                yield update

        fresh = super().aggregate(site, server, noted())
        h = self.matched(site, h, head, pool.value()["mean"])
        return self.deployed(fresh, self.retrained(site, h)) | {FEATURES: Tensors(h=h)}

    def deployed(self, model: Payload, head: Tensors) -> Payload:
        """The model with this head, and the head it had."""
        fresh = Tensors({f"{HEAD}{name}": t for name, t in head.items()})
        trained = model["parameters"].split(HEAD)[1]
        return model | {"parameters": model["parameters"] | fresh, TRAINED: trained}

    def matched(self, site: Site, h: Tensor, head: Tensors, g: Tensor) -> Tensor:
        """The federated features after this round's steps; a class that nobody has (g_c = 0) keeps its own."""

        def loss(net: Features, x: Tensor, y: Tensor) -> Tensor:
            return mismatch(g, federated(net.h, head), h.shape[2])

        row = Data(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        features = Features(h)
        inner = replace(site, net=features, data=row, device="cpu")
        fit(inner, loss, steps=self.match, training=Training(lr=self.match_lr, batch_size=1))
        return copied(features.h)

    def retrained(self, site: Site, h: Tensor) -> Tensors:
        """A fresh head, trained on the federated features."""
        C, n, d = h.shape
        head = copy.deepcopy(site.net.head)
        head.load_state_dict(self.fresh_head(site))
        data = Data(h.flatten(0, 1), torch.arange(C).repeat_interleave(n), torch.arange(C * n))
        inner = replace(site, net=Net(nn.Identity(), head, d), data=data, spares=[])
        fit(inner, site.loss, epochs=self.epochs, training=Training(lr=self.lr, batch_size=self.batch))
        return Tensors({name: copied(t) for name, t in head.named_parameters()})

    @staticmethod
    def fresh_head(site: Site) -> Tensors:
        """As nn.Linear draws one."""
        shapes = {name: t.shape for name, t in site.net.head.named_parameters()}
        bound = site.net.features**-0.5
        return Tensors({n: (torch.rand(s, generator=site.rng) * 2 - 1) * bound for n, s in shapes.items()})
