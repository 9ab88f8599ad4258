"""FedGen: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.

Zhu, Hong, Zhou. ICML 2021. arXiv:2105.10056

G(eps, y) makes features from noise and a label with one hidden layer, batch norm and ReLU. h_i is client i's head.
    Server: G minimises sum_i w_iy CE(h_i(G(eps, y)), y) + eta D,  w_iy = n_iy / sum_j n_jy over the cohort
            D = exp(-mean over pairs (i, j) of mean |eps_i - eps_j|^2 mean |G_i - G_j|)
    Client: CE(M(x), y) + (b / B) alpha_t CE(h(G(eps', y')), y') + beta_t KL(h(G(eps, y)) || M(x)),  y' over all classes
            alpha_t = alpha .98^t, beta_t = beta .98^t; b labels y' for a batch of B; G is frozen, in evaluation mode
The heads h_i are those that clients send, before averaging. The first round has no G and is FedAvg's.
As in the authors' code, labels that no client of the cohort has are not used on the server, and G's lr falls by .98 per
round.
Departure: the server's labels come in equal shares.
Departure: n_iy counts all samples of the client (the authors' code: those of the batches seen).
Departure: Adam starts afresh each round.
Departure: alpha and beta are 1 (the authors' code: 10, and 1 for EMNIST). With beta = 10 small federations diverge.
Omission: the student's term, which has the weight 0 in the authors' code.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedskew.core.fit import fit
from fedskew.core.losses import imitation
from fedskew.core.method import Method, Paper, Update
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive, Training
from fedskew.methods._shared.generators import GENERATOR, Generator, generator_from, new_generator, values_of
from fedskew.methods._shared.prototypes import enough

LABELS = "labels"  # group of the payload
DECAY = 0.98  # factor per round of alpha, beta and the generator's lr


def feature_generator(noise: int, hidden: int, features: int, classes: int) -> Generator:
    """G, with its initial values."""
    layers = nn.Sequential(
        nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
    )
    return Generator(layers, noise, classes, (features,))


def diversity(eps: Tensor, z: Tensor) -> Tensor:
    """D, which is small where different noise gives different features."""
    apart = torch.cdist(eps, eps).square() / eps.shape[1] * torch.cdist(z, z, p=1) / z.shape[1]
    return torch.exp(-apart.mean())


def teachers_loss(logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """sum_i w_iy CE(logits_i, y), mean over samples; logits [clients, n, C], w [clients, C]."""
    each = cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none")
    return (w[:, y] * each.view(len(logits), -1)).sum(0).mean()


def with_parameters(head: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a head with these parameters: calling it costs less than `functional_call` at every step."""
    made = copy.deepcopy(head)
    made.load_state_dict(values, strict=False)
    return made


@dataclass(frozen=True)
class FedGen(Method):
    """The server trains a generator of features from the clients' heads; clients use it as extra data."""

    paper = Paper(
        title="Data-Free Knowledge Distillation for Heterogeneous Federated Learning",
        authors="Zhu, Hong, Zhou",
        venue="ICML 2021",
        link="arXiv:2105.10056",
    )
    formula = (
        r"G &\leftarrow \underset{G}{\mathrm{argmin}} \; \sum_i w_{iy} \, \mathrm{CE}(h_i(G(\epsilon, y)), y) + \eta "
        r"D, \qquad w_{iy} = \frac{n_{iy}}{\sum_j n_{jy}} \\ "
        r"L_i &= \mathrm{CE}(M(x), y) + \frac{b}{B} \alpha_t \, \mathrm{CE}(h(G(\epsilon', y')), y') + \beta_t \, "
        r"\mathrm{KL}(h(G(\epsilon, y)) \,\|\, M(x))"
    )
    terms_off = {"alpha": 0.0, "beta": 0.0}
    sums_only = False
    quick = {"iterations": 3}

    alpha: NotNegative = setting(
        1.0,
        help="Weight of cross entropy on generated features; 0: off.",
        source="our choice, see above",
        search=(0.1, 30.0),
    )
    beta: NotNegative = setting(
        1.0,
        help="Weight of the distillation from generated features; 0: off.",
        source="the authors' code for EMNIST; it has 10 for other data",
        search=(0.1, 30.0),
    )
    eta: NotNegative = setting(1.0, help="Weight of the generator's diversity term.", source="the authors' code")
    noise: Count = setting(
        32, help="Noise inputs of the generator.", source="the authors' code for MNIST; 64 for CIFAR"
    )
    hidden: Count = setting(
        256, help="Width of the generator's hidden layer.", source="the authors' code for MNIST; 512 for CIFAR"
    )
    generated: Annotated[int, Meta(ge=2)] = setting(
        32, help="b: generated features in a client's batch, and the server's batch size.", source="the authors' code"
    )
    iterations: Natural = setting(50, help="Generator steps per round.", source="the authors' code")
    lr: Positive = setting(
        3e-4, help="Learning rate of the generator.", source="the authors' code, which has 1e-4 for EMNIST"
    )
    weight_decay: NotNegative = setting(0.01, help="Weight decay of the generator.", source="the authors' code")

    @property
    def on(self) -> bool:
        """Whether the generator is used at all."""
        return bool(self.alpha or self.beta)

    def maker(self, site: Site) -> "partial[Generator]":
        """A function that builds G for this site's net."""
        return partial(feature_generator, self.noise, self.hidden, site.net.features, site.classes)

    def broadcast(self, server: Payload) -> Payload:
        return server

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if GENERATOR not in broadcast:  # the first round
            return site.loss
        G = generator_from(self.maker(site), broadcast[GENERATOR]).to(site.device).requires_grad_(False).eval()
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
        return update.plus(**{LABELS: enough(Tensors(count=count), site.min_count)}), kept

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        heads, counts = list[Tensors](), list[Tensor]()

        def noted() -> Iterator[Update]:  # keeps the head and the label counts of every client
            for update in updates:
                if self.on:
                    heads.append(update.payload["parameters"].split("head.")[1])
                    counts.append(update.payload[LABELS]["count"])
                yield update

        averaged = super().aggregate(site, server, noted())
        if not any(count.any() for count in counts):  # off, or no client has enough samples of any class
            return averaged
        return averaged | {GENERATOR: self.train_generator(site, server, heads, torch.stack(counts))}

    def train_generator(self, site: Site, server: Payload, heads: list[Tensors], counts: Tensor) -> Tensors:
        """The parameters and buffers of the next G; counts [clients, C]."""
        G = (
            generator_from(self.maker(site), server[GENERATOR])
            if GENERATOR in server
            else new_generator(self.maker(site), site.rng)
        )
        frozen = site.frozen(server).head
        teachers = [with_parameters(frozen, {n.removeprefix("head."): t for n, t in head.items()}) for head in heads]
        w = (counts / counts.sum(0).clamp(min=1)).to(site.device)
        labels = counts.sum(0).nonzero().flatten()
        index = torch.arange(len(labels)).repeat(-(-self.iterations * self.generated // len(labels)))

        def loss(net: Generator, x: Tensor, y: Tensor) -> Tensor:
            eps = torch.rand(len(y), self.noise, generator=site.rng).to(site.device)
            z = net(eps, y)
            logits = torch.stack([teacher(z) for teacher in teachers])
            return teachers_loss(logits, y, w) + self.eta * diversity(eps, z)

        training = Training("adam", self.lr * DECAY**site.round, weight_decay=self.weight_decay)
        training = replace(training, batch_size=self.generated, steps=self.iterations)
        fit(replace(site, net=G.to(site.device), data=Data(labels[:, None], labels, index), training=training), loss)
        return values_of(G)
