"""Label-conditional generators: their layers, the losses that tie them to prototypes, and the virtual sets they make.

The generator makes a virtual set in evaluation mode from a seed: every site that has both makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedskew.core.net import Shape, image_shape
from fedskew.core.seeding import seeded
from fedskew.core.site import copied
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.virtual import new_seed, virtual_labels

GENERATOR = "generator"  # group of the payload
NOISE = 512  # inputs of the image generators
WIDTHS = (128, 256, 512, 1024)
CHANNELS = (32, 16)
Distance = Literal["squared", "norm"]


class Generator(nn.Module):
    """Makes samples [n, *shape] from noise [n, noise] and labels [n]."""

    def __init__(self, layers: nn.Module, noise: int, classes: int, shape: Shape) -> None:
        super().__init__()
        self.layers, self.noise, self.classes, self.shape = layers, noise, classes, shape

    def forward(self, eps: Tensor, y: Tensor) -> Tensor:
        given = torch.cat([eps, one_hot(y, self.classes).to(eps.dtype)], 1)
        made: Tensor = self.layers(given)
        return made.view(len(y), *self.shape)


def fully_connected(shape: Shape, classes: int) -> Generator:
    """FedPG's generator: five linear layers, batch norm and LeakyReLU between them, tanh at the end."""
    layers = nn.Sequential()
    for width_in, width_out in pairwise((NOISE + classes, *WIDTHS)):
        layers.extend([nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out), nn.LeakyReLU(0.2)])
    layers.extend([nn.Linear(WIDTHS[-1], prod(shape)), nn.Tanh()])
    return Generator(layers, NOISE, classes, shape)


def convolutional(shape: Shape, classes: int) -> Generator:
    """A linear layer to a quarter of the image's size, then twice upsampling and convolution, then tanh."""
    channels, height, width = image_shape("gen=cnn", shape)
    (half, quarter), (first, second) = ([(-(-height // k), -(-width // k)) for k in (2, 4)]), CHANNELS
    layers = nn.Sequential(
        nn.Linear(NOISE + classes, first * prod(quarter)),
        nn.Unflatten(1, (first, *quarter)),
        nn.BatchNorm2d(first),
        nn.LeakyReLU(0.2),
        nn.Upsample(half),
        nn.Conv2d(first, second, 3, padding=1),
        nn.BatchNorm2d(second),
        nn.LeakyReLU(0.2),
        nn.Upsample((height, width)),
        nn.Conv2d(second, channels, 3, padding=1),
        nn.Tanh(),
    )
    return Generator(layers, NOISE, classes, shape)


KINDS: dict[str, Callable[[Shape, int], Generator]] = {"fc": fully_connected, "cnn": convolutional}


def new_generator(make: Callable[[], Generator], rng: torch.Generator) -> Generator:
    """A generator with initial values drawn from `rng`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(new_seed(rng))
        return make()


def generator_from(make: Callable[[], Generator], values: Tensors) -> Generator:
    """A generator with copies of these parameters and buffers, as `values_of` returns them."""
    with torch.device("meta"):  # no initial values are drawn, as they would be overwritten
        generator = make()
    generator.to_empty(device="cpu").load_state_dict(values)
    return generator


def values_of(generator: Generator) -> Tensors:
    """Copies of the generator's parameters and buffers."""
    return Tensors({name: copied(t) for name, t in generator.state_dict().items()})


@torch.no_grad()
def virtual_set(generator: Generator, each: int, seed: int) -> Tensor:
    """`each` samples of every class, ordered by class. Made on the CPU, as other devices round differently."""
    y = virtual_labels(generator.classes, each)
    eps = torch.rand(len(y), generator.noise, generator=seeded(seed))
    made: Tensor = generator.cpu().eval()(eps, y)
    return made


def scaled_distances(z: Tensor, P: Tensor, tau: float, distance: Distance) -> Tensor:
    """tau |z - P|^2 (`squared`) or |z - P| / tau (`norm`), [n, classes].

    Computed from differences, because the expanded square can come out negative.
    """
    norm = torch.cdist(z, P, compute_mode="donot_use_mm_for_euclid_dist")
    return tau * norm.square() if distance == "squared" else norm / tau


def distance_cross_entropy(z: Tensor, y: Tensor, P: Tensor, tau: float, distance: Distance = "squared") -> Tensor:
    """FedPG's Eq. 8: cross entropy with the negative `scaled_distances` as logits, mean over samples."""
    return cross_entropy(-scaled_distances(z, P, tau, distance), y)


def anchoring(virtual: Tensor, P: Tensor, known: Tensor, tau: float, distance: Distance = "squared") -> Tensor:
    """FedPG's Eq. 6 and 7: pulls virtual prototypes to the real ones, over the `known` classes (a mask)."""
    made, real = virtual[known], P[known]
    if len(made) < 2:
        return (made - real).square().sum()
    return distance_cross_entropy(made, torch.arange(len(made), device=made.device), real, tau, distance)


def nearest_is_own(z: Tensor, y: Tensor, P: Tensors) -> float:
    """Share of features whose nearest known prototype is that of their class; classes without one are left out."""
    known = P["count"] > 0
    z, y = z[known[y]], y[known[y]]
    near = torch.cdist(z, P["mean"]).masked_fill(~known, torch.inf).argmin(1)
    return float((near == y).float().mean())
