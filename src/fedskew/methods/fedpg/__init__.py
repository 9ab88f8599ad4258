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
source=noise: D' is VHL's fixed noise, the same in all rounds from the first on. There is no G, P or P'; only a seed is
sent. It shows what the generator adds: on two of three splits the noise is ahead of it (results/fedpg-fmnist).
Preset robust: source=noise. The gain comes from labelled images that are the same at all clients, not from what they
show. With source=generator: P'_c starts at P_c for c in H, otherwise at its last value (at first near the mean of P);
300 steps of batch 128 at lr 1e-3, but only in every tenth round: D' stays as it is in between.
Preset paper: source=generator, P' starts at N(0, 1) each round, Adam's lr is 2e-5. No coordinate then moves by more
than 0.008 in a round: P' stays near its random start, and the images' features gather around points unrelated to P.
GT-d: anchor=false; GT-p: lambda_s=0; LT-fa: lambda_c=0; LT-ct: lambda_v=0.
As in the authors' code: Eq. 7, 8 with the square times tau and y in the denominator (without it Eq. 8 has no lower
bound), the mean for Eq. 6's sum, Eq. 11 as SupCon, Adam(.5, .999), lr times .95 every 20 steps, real and virtual
batches in two passes.
Departure: Eq. 7 runs over H (the code has zeros for other classes); for one class its log is 0, |P'_c - P_c|^2 is used.
Departure: f is frozen (the code also trains a copy of it).
Departure: a client sends which classes it has, not how many samples.
Departure: virtual batches do not move the running statistics of batch norm (in the authors' code half of each is
virtual): the model is used on real images.
Departure: D' is sent without labels, ordered by class. With ship=generator, G and a seed are sent instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from fedskew.core.losses import alignment
from fedskew.core.method import Method, Paper, Update, model_of
from fedskew.core.net import Net, Seen, still_statistics
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
    generator_from,
    new_generator,
    values_of,
    virtual_set,
)
from fedskew.methods._shared.prototypes import (
    GROUP,
    PrototypeMean,
    class_means,
    enough,
    no_prototypes,
    some_of_each,
)
from fedskew.methods._shared.virtual import (
    contrast_to_virtual,
    endless_batches,
    input_shape,
    new_seed,
    noise_set,
    standardise,
    virtual_labels,
)
from fedskew.methods.fedpg.generator_training import PRESETS, GeneratorTraining, Preset, Source, Start

VIRTUAL = "virtual"  # group of the payload: D', or the seed of its noise
BatchSize = Annotated[int, Meta(ge=2)]


@dataclass(frozen=True)
class FedPG(Method):
    """Clients also learn from labelled virtual images that all of them share: fixed noise, or a generator's."""

    paper = Paper(
        title="FedPG: A Privacy-friendly and Universal Method for Solving non-IID Data in Federated Learning",
        authors="Xue, Zhang, Chen, Meng",
        venue="Nanjing University of Aeronautics and Astronautics",
        link="code: github.com/XueBaolu/FedPG",
    )
    formula = (
        r"L_k &= \mathrm{CE}(M(x), y) + \lambda_v \, \mathrm{CE}(M(x'), y') + \lambda_c \, l_{fa}, "
        r"\qquad (x', y') \in D' \\ "
        r"l_{fa} &= \mathrm{SupCon}\bigl( (f(x), y), (f(x'), y') \bigr) + 0.1 \, \mathrm{SupCon}(f(x'), y') \\ "
        r"L_G &= l_{dce} + \lambda_s l_p + d(P', P) \qquad (\text{source=generator})"
    )
    terms_off = {"lambda_c": 0.0, "lambda_v": 0.0}
    quick = {"iterations": 3, "generator_batch": 16, "virtual_batch": 8}

    preset: Literal["robust", "paper"] = setting(
        "robust",
        help="Defaults of source and of the generator's training: paper as published, robust as described above.",
        source="our choice",
    )
    source: Source | None = setting(
        None,
        help="Virtual images: VHL's fixed noise, or a generator's; None: the preset's, noise or generator.",
        source="the preset; generator is the paper's",
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
    iterations: Natural | None = setting(
        None, help="Generator steps in a round that trains it; None: the preset's, 300.", source="the preset"
    )
    generate_every: Count | None = setting(
        None,
        help="Rounds from one training of the generator to the next; D' stays in between. None: the preset's, 10 or 1.",
        source="the preset",
    )
    generator_batch: BatchSize | None = setting(
        None, help="Batch size of the generator; None: the preset's, 128.", source="the preset"
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

    @property
    def generates(self) -> bool:
        """Whether a generator makes them."""
        return self.on and self.chosen("source") == "generator"

    def chosen(self, field: str) -> Any:
        """The value of a field, or the preset's if it is None."""
        value = getattr(self, field)
        return getattr(PRESETS[self.preset], field) if value is None else value

    def ended(self, round: int) -> bool:
        """Whether virtual images are no longer used in this round."""
        return self.until is not None and round >= self.until

    def generator_training(self) -> GeneratorTraining:
        """How G and P' are trained, by the settings and the preset."""
        chosen = Preset(*(self.chosen(field) for field in Preset._fields))
        return GeneratorTraining(chosen, self.lambda_s, self.anchor, self.tau, self.distance)

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if self.generates or not self.on or self.ended(0):
            return server
        return server | {VIRTUAL: Tensors(seed=torch.tensor(new_seed(site.rng)))}

    def broadcast(self, server: Payload) -> Payload:
        shipped = GENERATOR if self.generates and self.ship == "generator" else VIRTUAL
        return model_of(server) | {group: server[group] for group in (shipped,) if group in server}

    def virtual(self, site: Site, broadcast: Payload) -> Tensor:
        """The images of D' as input of a net: as received, or made from a received seed or generator."""
        if "seed" in broadcast.get(VIRTUAL, {}):
            return noise_set(site.data, site.classes, self.n_v, int(broadcast[VIRTUAL]["seed"]))
        if VIRTUAL in broadcast:
            return self.seen(broadcast[VIRTUAL]["images"], site.data)
        values = Tensors(broadcast[GENERATOR])
        seed = int(values.pop("seed"))
        return self.seen(virtual_set(generator_from(self.maker(site), values), self.n_v, seed), site.data)

    def maker(self, site: Site) -> "partial[Generator]":
        """A function that builds G for this site's data."""
        return partial(KINDS[self.gen], input_shape(site.data), site.classes)

    def seen(self, images: Tensor, data: Data) -> Tensor:
        """Generated images as input of a net."""
        return standardise((images + 1) / 2, data) if self.pixels else images

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        if not broadcast.keys() & {VIRTUAL, GENERATOR}:  # a generator's first round, or all have ended
            return site.loss
        images = self.virtual(site, broadcast).to(site.device)
        labels = virtual_labels(site.classes, self.n_v).to(site.device)
        virtual_batches = endless_batches(images, labels, self.virtual_batch, site.rng)
        align = alignment if self.fa == "supcon" else contrast_to_virtual

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            x_v, y_v = next(virtual_batches)
            z = net.body(x)
            with still_statistics(net):
                z_v = net.body(x_v)
            total = site.loss(Seen(net, z), x, y)
            if self.lambda_v:
                total = total + self.lambda_v * site.loss(Seen(net, z_v), x_v, y_v)
            if self.lambda_c:
                total = total + self.lambda_c * align(z, y, z_v, y_v, self.tau_c)
            return total

        return loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, kept = super().client(site, broadcast, state)
        return (update.plus(**{GROUP: self.prototypes(site)}) if self.generates else update), kept

    def prototypes(self, site: Site) -> Tensors:
        """Eq. 4; `count` is 1 for a class that the client has."""
        few = site.data.part(some_of_each(site.data.labels, self.m, site.rng))
        own = class_means(site.infer(site.net.body, few), few.labels, site.classes)
        own = enough(own, site.min_count)
        return own | {"count": (own["count"] > 0).float()}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        pool = PrototypeMean(no_prototypes(site), uniform=True)
        averaged = super().aggregate(site, server, pool.watch(updates) if self.generates else updates)
        if self.ended(site.round + 1):
            return model_of(averaged)
        due = self.generates and (GENERATOR not in server or site.round % self.chosen("generate_every") == 0)
        return averaged | self.generated(site, averaged, pool.value()) if due else averaged

    def generated(self, site: Site, server: Payload, P: Tensors) -> Payload:
        """The server's groups after Eq. 10, trained from its last G and P': G, P' and the virtual set."""
        make, known = self.maker(site), GENERATOR in server
        last = server[GROUP]["virtual"] if known else None
        values = Tensors({name: t for name, t in server.get(GENERATOR, {}).items() if name != "seed"})
        G = generator_from(make, values) if known else new_generator(make, site.rng)
        virtual = self.generator_training().started(P, last, site.rng).to(site.device).requires_grad_()
        self.train_generator(site, site.frozen(server).body, G.to(site.device), virtual, P)
        seed = new_seed(site.rng)
        images = {VIRTUAL: Tensors(images=virtual_set(G, self.n_v, seed))} if self.ship == "images" else {}
        return images | {
            GENERATOR: values_of(G) | {"seed": torch.tensor(seed)},
            GROUP: P | {"virtual": virtual.detach().cpu()},
        }

    def train_generator(self, site: Site, f: nn.Module, G: Generator, virtual: Tensor, P: Tensors) -> None:
        """Eq. 10: train G and P' in place."""

        def features(images: Tensor) -> Tensor:
            z: Tensor = f(self.seen(images, site.data))
            return z

        self.generator_training().train(site, features, G, virtual, P)
