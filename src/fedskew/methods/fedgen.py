"""FedGen: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.

Zhu, Hong, Zhou. ICML 2021. arXiv:2105.10056

G(eps, y) makes features from noise and a label: one hidden layer, batch norm, ReLU. h_i is client i's head.
    Server: G minimises sum_i w_iy CE(h_i(G(eps, y)), y) + eta D,  w_iy = n_iy / sum_j n_jy over the cohort
            D = exp(-mean over pairs (i, j) of mean |eps_i - eps_j|^2 mean |G_i - G_j|)
    Client: CE(M(x), y) + (b / B) alpha_t CE(h(G(eps', y')), y') + beta_t KL(h(G(eps, y)) || M(x)),  y' over all classes
            alpha_t = alpha .98^t, beta_t = beta .98^t; b draws y' for a batch of B; G is constant, in evaluation mode
The heads are those the clients send, before they are averaged. The first round has no G and is FedAvg's.
Weights, rates and sizes are those of the authors' code. As there, labels that nobody in the cohort has are not drawn on
the server, and G's lr falls by .98 a round.
Departure: labels come in even shares, n_iy are all the client's samples, Adam starts anew each round.
Omission: the student's term, of weight 0 in the authors' code.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedskew.core.fit import fit
from fedskew.core.losses import imitation
from fedskew.core.method import Method, Update
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive, Training
from fedskew.methods._shared.generators import GENERATOR, Generator, drawn, rebuilt, values_of

LABELS = "labels"  # group of the payload
DECAY = 0.98  # a round


def latent(noise: int, hidden: int, features: int, classes: int) -> Generator:
    layers = nn.Sequential(
        nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
    )
    return Generator(layers, noise, classes, (features,))


def diversity(eps: Tensor, z: Tensor) -> Tensor:
    """D: small where different noise makes different features."""
    apart = torch.cdist(eps, eps).square() / eps.shape[1] * torch.cdist(z, z, p=1) / z.shape[1]
    return torch.exp(-apart.mean())


def taught(logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """sum_i w_iy CE(logits_i, y), mean over samples; logits [clients, n, C], w [clients, C]."""
    each = torch.stack([cross_entropy(own, y, reduction="none") for own in logits])
    return (w[:, y] * each).sum(0).mean()


@dataclass(frozen=True)
class FedGen(Method):
    alpha: NotNegative = 10.0  # the original's
    beta: NotNegative = 10.0  # the original's; 1 on EMNIST
    eta: NotNegative = 1.0  # the original's
    noise: Count = 32  # the original's on MNIST; 64 on CIFAR
    hidden: Count = 256  # the original's on MNIST; 512 on CIFAR
    generated: Annotated[int, Meta(ge=2)] = 32  # the original's b, and the server's batch
    iterations: Natural = 50  # the original's
    lr: Positive = 3e-4  # the original's; 1e-4 on EMNIST
    weight_decay: NotNegative = 0.01  # the original's

    @property
    def on(self) -> bool:
        return bool(self.alpha or self.beta)

    def maker(self, site: Site) -> "partial[Generator]":
        return partial(latent, self.noise, self.hidden, site.net.features, site.classes)

    def broadcast(self, server: Payload) -> Payload:
        return server

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if GENERATOR not in broadcast:  # the first round
            return site.loss
        G = rebuilt(self.maker(site), broadcast[GENERATOR]).to(site.device).requires_grad_(False).eval()
        alpha, beta = (max(1e-4, start * DECAY**site.round) if start else 0.0 for start in (self.alpha, self.beta))
        alpha *= self.generated / site.training.batch_size

        def features(y: Tensor) -> Tensor:
            made: Tensor = G(torch.rand(len(y), self.noise, generator=site.rng).to(site.device), y)
            return made

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            logits = net(x)
            total = site.loss(lambda _: logits, x, y)
            if beta:
                total = total + beta * imitation(logits, net.head(features(y)))
            if alpha:
                y_g = torch.randint(site.classes, (self.generated,), generator=site.rng).to(site.device)
                total = total + alpha * cross_entropy(net.head(features(y_g)), y_g)
            return total

        return loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, kept = super().client(site, broadcast, state)
        if not self.on:
            return update, kept
        count = torch.bincount(site.data.labels, minlength=site.classes).float()
        return update.plus(**{LABELS: Tensors(count=count)}), kept

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        heads, counts = list[Tensors](), list[Tensor]()

        def noted() -> Iterator[Update]:  # of every client only the head is kept
            for update in updates:
                if self.on:
                    heads.append(update.payload["parameters"].split("head.")[1])
                    counts.append(update.payload[LABELS]["count"])
                yield update

        averaged = super().aggregate(site, server, noted())
        return averaged | {GENERATOR: self.trained(site, server, heads, torch.stack(counts))} if heads else averaged

    def trained(self, site: Site, server: Payload, heads: list[Tensors], counts: Tensor) -> Tensors:
        """The next G; counts [clients, C]."""
        G = rebuilt(self.maker(site), server[GENERATOR]) if GENERATOR in server else drawn(self.maker(site), site.rng)
        frozen = site.frozen(server).head
        teachers = [{n.removeprefix("head."): t.to(site.device) for n, t in head.items()} for head in heads]
        w = (counts / counts.sum(0).clamp(min=1)).to(site.device)
        labels = counts.sum(0).nonzero().flatten()
        index = torch.arange(len(labels)).repeat(-(-self.iterations * self.generated // len(labels)))

        def loss(net: Generator, x: Tensor, y: Tensor) -> Tensor:
            eps = torch.rand(len(y), self.noise, generator=site.rng).to(site.device)
            z = net(eps, y)
            logits = torch.stack([functional_call(frozen, teacher, (z,)) for teacher in teachers])
            return taught(logits, y, w) + self.eta * diversity(eps, z)

        training = Training("adam", self.lr * DECAY**site.round, weight_decay=self.weight_decay)
        training = replace(training, batch_size=self.generated, steps=self.iterations)
        fit(replace(site, net=G.to(site.device), data=Data(labels[:, None], labels, index), training=training), loss)
        return values_of(G)
