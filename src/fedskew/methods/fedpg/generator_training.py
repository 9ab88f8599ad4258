"""FedPG's training of a generator G and of virtual prototypes P' against real prototypes P (Eq. 6 to 10); presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedskew.core.site import Site
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.generators import Distance, Generator, anchoring, distance_cross_entropy

Source = Literal["noise", "generator"]
Start = Literal["real", "random"]


class Preset(NamedTuple):
    """Values of the settings of FedPG that are left None."""

    source: Source
    start: Start
    lr: float
    iterations: int
    generator_batch: int
    generate_every: int


PRESETS = {
    "robust": Preset("noise", "real", 1e-3, 300, 128, 10),
    "paper": Preset("generator", "random", 2e-5, 300, 128, 1),
}


class GeneratorTraining(NamedTuple):
    """How G and P' are trained in a round; the fields are its settings."""

    chosen: Preset
    lambda_s: float
    anchor: bool
    tau: float
    distance: Distance

    def started(self, P: Tensors, last: Tensor | None, rng: torch.Generator) -> Tensor:
        """P' before the round's training; `last` is that of the round before."""
        random, known = torch.randn(P["mean"].shape, generator=rng), P["count"] > 0
        if self.chosen.start == "random":
            return random
        if last is None:
            real = P["mean"][known]
            last = real.mean(0) + real.std(correction=0) * random if len(real) else random
        return torch.where(known[:, None], P["mean"], last)

    def train(self, site: Site, f: Callable[[Tensor], Tensor], G: Generator, virtual: Tensor, P: Tensors) -> None:
        """Eq. 10: train G and P' in place. `f` gives the features of G's images.

        `fit` has neither this schedule nor training without data.
        """
        optimiser = torch.optim.Adam([*G.parameters(), virtual], self.chosen.lr, betas=(0.5, 0.999), fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 20, 0.95)
        real, known = P["mean"].to(site.device), (P["count"] > 0).to(site.device)
        for _ in range(self.chosen.iterations):
            y = torch.randint(site.classes, (self.chosen.generator_batch,), generator=site.rng).to(site.device)
            eps = torch.rand(len(y), G.noise, generator=site.rng).to(site.device)
            optimiser.zero_grad()
            loss = self.loss(f(G(eps, y)), y, virtual, real, known)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()

    def loss(self, z: Tensor, y: Tensor, virtual: Tensor, P: Tensor, known: Tensor) -> Tensor:
        """L_G of Eq. 10 for features z of generated images with labels y; `known` is a mask of the classes in P."""
        total = distance_cross_entropy(z, y, virtual, self.tau, self.distance)
        if self.lambda_s:
            total = total + self.lambda_s * (z - virtual[y]).square().sum(1).mean()
        return total + anchoring(virtual, P, known, self.tau, self.distance) if self.anchor else total
