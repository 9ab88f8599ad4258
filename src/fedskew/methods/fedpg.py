"""FedPG: A Privacy-friendly and Universal Method for Solving non-IID Data in Federated Learning.

Xue, Zhang, Chen, Meng. Nanjing University of Aeronautics and Astronautics. code: github.com/XueBaolu/FedPG

M = (f, head) is the model, f makes features, G images. P'_c are trainable virtual prototypes. H are the classes whose
prototypes the server received.
    Eq. 4, 5: P_kc = mean f_k(x) over m samples of class c at client k, after training;  P_c = mean_k P_kc
    Eq. 6, 7: d(P', P) = mean_{c in H} CE_{i in H}(-tau |P'_c - P_i|^2, c)
    Eq. 8:    l_dce = CE_c(-tau |z - P'_c|^2, y),  z = f(G(eps, y)),  eps ~ U[0, 1)^512
    Eq. 9:    l_p = |z - P'_y|^2
    Eq. 10:   L_G = l_dce + lambda_s l_p + d(P', P), over G and P';  f is that of the new global model, frozen
    Eq. 11:   l_fa = SupCon over (f(x), y) and (f(x'), y'), temperature tau_c, f(x') constant, + 0.1 SupCon over f(x')
    Eq. 13:   L_k = CE(M(x), y) + lambda_v CE(M(x'), y') + lambda_c l_fa,  (x', y') from D', n_v images per class
Algorithm 1: D' is made after each round; the first round has none and is FedAvg's.
Preset paper: P' starts at N(0, 1) each round, Adam's lr is 2e-5. No coordinate then moves by more than 0.008: P' stays
near its random start, and the images' features gather around points unrelated to P.
Preset robust: P'_c starts at P_c for c in H, otherwise at its last value (at first near the mean of P); lr is 1e-3.
GT-d: anchor=false; GT-p: lambda_s=0; LT-fa: lambda_c=0; LT-ct: lambda_v=0.
As in the authors' code: Eq. 7, 8 with the square times tau and y in the denominator (without it Eq. 8 has no lower
bound), the mean for Eq. 6's sum, Eq. 11 as SupCon, Adam(.5, .999), lr times .95 every 20 steps, real and virtual
batches in two passes.
Departure: Eq. 7 runs over H (the code has zeros for other classes); for one class its log is 0, |P'_c - P_c|^2 is used.
Departure: f is frozen (the code also trains a copy of it).
Departure: a client sends which classes it has, not how many samples.
Departure: D' is sent without labels, ordered by class. With ship=generator, G and a seed are sent instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import normalize

from fedskew.core.losses import alignment
from fedskew.core.method import Method, Paper, Update, model_of
from fedskew.core.net import Net, Seen
from fedskew.core.samples import Data
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive
from fedskew.methods._shared.generators import (
    GENERATOR,
    KINDS,
    Distance,
    Generator,
    anchoring,
    distance_cross_entropy,
    endless_batches,
    generator_from,
    input_shape,
    new_generator,
    new_seed,
    standardise,
    values_of,
    virtual_labels,
    virtual_set,
)
from fedskew.methods._shared.prototypes import GROUP, PrototypeMean, class_means, no_prototypes

VIRTUAL = "virtual"  # group of the payload: D'
Start = Literal["real", "random"]
PRESETS: dict[str, tuple[Start, float]] = {"robust": ("real", 1e-3), "paper": ("random", 2e-5)}


def contrast_to_virtual(z: Tensor, y: Tensor, z_v: Tensor, y_v: Tensor, tau: float) -> Tensor:
    """Eq. 11 of normalised features, with positives in the denominator too; a sample without positives adds 0."""
    s, own = normalize(z, dim=1) @ normalize(z_v, dim=1).T / tau, y[:, None] == y_v
    log_p = s.masked_fill(~own, -torch.inf).logsumexp(1) - s.logsumexp(1)
    return -torch.where(own.any(1), log_p, 0.0).mean()


def some_of_each(labels: Tensor, m: int, rng: torch.Generator) -> Tensor:
    """Positions of m random samples of each class, or of all where there are fewer."""
    order = torch.randperm(len(labels), generator=rng)
    order = order[labels[order].argsort(stable=True)]  # sorted by class, in random order within each
    count = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (count.cumsum(0) - count)[labels[order]]
    return order[rank < m]


@dataclass(frozen=True)
class FedPG(Method):
    """The server trains an image generator guided by class prototypes; clients learn from its images as well."""

    paper = Paper(
        title="FedPG: A Privacy-friendly and Universal Method for Solving non-IID Data in Federated Learning",
        authors="Xue, Zhang, Chen, Meng",
        venue="Nanjing University of Aeronautics and Astronautics",
        link="code: github.com/XueBaolu/FedPG",
    )
    terms_off = {"lambda_c": 0.0, "lambda_v": 0.0}
    quick = {"iterations": 3, "generator_batch": 16, "virtual_batch": 8}

    preset: Literal["robust", "paper"] = setting(
        "robust", help="Defaults of lr and start: paper as published, robust as described above.", source="our choice"
    )
    lambda_c: NotNegative = setting(
        1.0,
        help="Weight of the feature alignment; 0: off.",
        source="the paper; 10 is best in its Fig. 7",
        search=(0.1, 20.0),
    )
    lambda_v: NotNegative = setting(
        1.0, help="Weight of cross entropy on virtual images; 0: off.", source="the paper", search=(0.1, 2.0)
    )
    lambda_s: NotNegative = setting(0.001, help="Weight of l_p; 0: off.", source="the paper")
    anchor: bool = setting(True, help="Pull P' to P by d(P', P); False: off.", source="the paper")
    tau: Positive = setting(2.0, help="Scale of distances in Eq. 7 and 8.", source="the paper")
    tau_c: Positive = setting(0.07, help="Temperature of the alignment.", source="the authors' code")
    n_v: Count = setting(64, help="Virtual images per class.", source="the paper; 256 is best in its Table 2")
    virtual_batch: Count = setting(64, help="Virtual images in each batch of a client.", source="the paper")
    m: Count = setting(20, help="Samples per class behind a client's prototypes.", source="the authors' code")
    iterations: Natural = setting(300, help="Generator steps per round.", source="the paper")
    generator_batch: Annotated[int, Meta(ge=2)] = setting(
        128, help="Batch size of the generator.", source="the authors' code"
    )
    lr: Positive | None = setting(
        None, help="Learning rate of G and P'; None: the preset's, 1e-3 or 2e-5.", source="the preset"
    )
    start: Start | None = setting(
        None, help="Start of P': the real prototypes, or N(0, 1); None: the preset's.", source="the preset"
    )
    gen: Literal["fc", "cnn"] = setting(
        "fc", help="Generator: fully connected or convolutional.", source="the paper; the layers of cnn are ours"
    )
    ship: Literal["images", "generator"] = setting(
        "images", help="What is sent: D', or G and a seed, from which clients make D'.", source="the paper"
    )
    distance: Distance = setting(
        "squared",
        help="Distances in Eq. 7 and 8: tau |.|^2, or norm: |.| / tau.",
        source="the authors' code; norm as printed",
    )
    fa: Literal["supcon", "eq11"] = setting(
        "supcon",
        help="Alignment: SupCon, or Eq. 11 with the positives in the denominator too.",
        source="the authors' code; eq11 is near the print",
    )
    pixels: bool = setting(
        False, help="True: map G's [-1, 1] to pixels, normalised as real ones are.", source="the authors' code"
    )
    until: Natural | None = setting(
        None,
        help="Round from which on it is FedAvg; None: never.",
        source="the paper; the authors' notebook has 30",
    )

    @property
    def on(self) -> bool:
        """Whether virtual images are used at all."""
        return bool(self.lambda_c or self.lambda_v)

    def broadcast(self, server: Payload) -> Payload:
        shipped = VIRTUAL if self.ship == "images" else GENERATOR
        return model_of(server) | {group: server[group] for group in (shipped,) if group in server}

    def virtual(self, site: Site, broadcast: Payload) -> Tensor:
        """The images of D' in [-1, 1], as received or made from the received generator."""
        if VIRTUAL in broadcast:
            return broadcast[VIRTUAL]["images"]
        values = Tensors(broadcast[GENERATOR])
        seed = int(values.pop("seed"))
        return virtual_set(generator_from(self.maker(site), values), self.n_v, seed)

    def maker(self, site: Site) -> "partial[Generator]":
        """A function that builds G for this site's data."""
        return partial(KINDS[self.gen], input_shape(site.data), site.classes)

    def seen(self, images: Tensor, data: Data) -> Tensor:
        """Virtual images as input of a net."""
        return standardise((images + 1) / 2, data) if self.pixels else images

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if not broadcast.keys() & {VIRTUAL, GENERATOR}:  # the first round
            return site.loss
        images = self.seen(self.virtual(site, broadcast), site.data).to(site.device)
        labels = virtual_labels(site.classes, self.n_v).to(site.device)
        virtual_batches = endless_batches(images, labels, self.virtual_batch, site.rng)
        align = alignment if self.fa == "supcon" else contrast_to_virtual

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            x_v, y_v = next(virtual_batches)
            z, z_v = net.body(x), net.body(x_v)
            total = site.loss(Seen(net, z), x, y)
            if self.lambda_v:
                total = total + self.lambda_v * site.loss(Seen(net, z_v), x_v, y_v)
            if self.lambda_c:
                total = total + self.lambda_c * align(z, y, z_v, y_v, self.tau_c)
            return total

        return loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, kept = super().client(site, broadcast, state)
        return (update.plus(**{GROUP: self.prototypes(site)}) if self.on else update), kept

    def prototypes(self, site: Site) -> Tensors:
        """Eq. 4; `count` is 1 for a class that the client has."""
        few = site.data.part(some_of_each(site.data.labels, self.m, site.rng))
        own = class_means(site.infer(site.net.body, few), few.labels, site.classes)
        return own | {"count": (own["count"] > 0).float()}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        if not self.on:
            return super().aggregate(site, server, updates)
        pool = PrototypeMean(no_prototypes(site), uniform=True)
        averaged = super().aggregate(site, server, pool.watch(updates))
        if self.until is not None and site.round + 1 >= self.until:
            return model_of(averaged)
        return averaged | self.generated(site, averaged, pool.value())

    def generated(self, site: Site, server: Payload, P: Tensors) -> Payload:
        """The server's groups after Eq. 10, trained from its last G and P': G, P' and the virtual set."""
        make, known = self.maker(site), GENERATOR in server
        last = server[GROUP]["virtual"] if known else None
        values = Tensors({name: t for name, t in server.get(GENERATOR, {}).items() if name != "seed"})
        G = generator_from(make, values) if known else new_generator(make, site.rng)
        virtual = self.started(P, last, site.rng).to(site.device).requires_grad_()
        self.train_generator(site, site.frozen(server).body, G.to(site.device), virtual, P)
        seed = new_seed(site.rng)
        images = {VIRTUAL: Tensors(images=virtual_set(G, self.n_v, seed))} if self.ship == "images" else {}
        return images | {
            GENERATOR: values_of(G) | {"seed": torch.tensor(seed)},
            GROUP: P | {"virtual": virtual.detach().cpu()},
        }

    def started(self, P: Tensors, last: Tensor | None, rng: torch.Generator) -> Tensor:
        """P' before the round's training."""
        random, known = torch.randn(P["mean"].shape, generator=rng), P["count"] > 0
        if (self.start or PRESETS[self.preset][0]) == "random":
            return random
        if last is None:
            real = P["mean"][known]
            last = real.mean(0) + real.std(correction=0) * random if len(real) else random
        return torch.where(known[:, None], P["mean"], last)

    def train_generator(self, site: Site, f: Any, G: Generator, virtual: Tensor, P: Tensors) -> None:
        """Eq. 10: train G and P' in place. `fit` has neither this schedule nor training without data."""
        lr = self.lr or PRESETS[self.preset][1]
        optimiser = torch.optim.Adam([*G.parameters(), virtual], lr, betas=(0.5, 0.999), fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 20, 0.95)
        real, known = P["mean"].to(site.device), (P["count"] > 0).to(site.device)
        for _ in range(self.iterations):
            y = torch.randint(site.classes, (self.generator_batch,), generator=site.rng).to(site.device)
            eps = torch.rand(len(y), G.noise, generator=site.rng).to(site.device)
            optimiser.zero_grad()
            loss = self.generator_loss(f(self.seen(G(eps, y), site.data)), y, virtual, real, known)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()

    def generator_loss(self, z: Tensor, y: Tensor, virtual: Tensor, P: Tensor, known: Tensor) -> Tensor:
        """L_G of Eq. 10 for features z of generated images with labels y."""
        total = distance_cross_entropy(z, y, virtual, self.tau, self.distance)
        if self.lambda_s:
            total = total + self.lambda_s * (z - virtual[y]).square().sum(1).mean()
        return total + anchoring(virtual, P, known, self.tau, self.distance) if self.anchor else total
