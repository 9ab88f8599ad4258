"""Virtual sets: labelled samples that are no one's data. VHL's are fixed noise, FedPG's noise or generated.

A virtual set is ordered by class, so its labels follow from its length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from fedskew.core.net import Shape
from fedskew.core.samples import Data
from fedskew.core.seeding import seeded

LOW = (8, 8)  # height and width of the noise before it is enlarged
SEEDS = 1 << 32  # `seeded` keeps all bits of smaller numbers


def new_seed(rng: torch.Generator) -> int:
    """A random seed below 2^32."""
    return int(torch.randint(SEEDS, (), generator=rng))


def virtual_labels(classes: int, each: int) -> Tensor:
    """The labels of a virtual set with `each` samples per class."""
    return torch.arange(classes).repeat_interleave(each)


def noise_set(data: Data, classes: int, each: int, seed: int) -> Tensor:
    """VHL's Gaussian_Noise as input of a net: `each` samples of every class, the same bits wherever the seed is."""
    rng, shape = seeded(seed), input_shape(data)
    pictures = len(shape) == 3
    low = (shape[0], *LOW) if pictures else shape
    means = torch.randn(classes, *low, generator=rng).repeat_interleave(each, 0)
    samples = means + 0.5 * torch.randn(means.shape, generator=rng)
    if not pictures:
        return samples
    pixels = interpolate(samples, shape[1:], mode="bilinear", align_corners=False)
    return standardise(pixels.clamp(0, 1), data)


def input_shape(data: Data) -> Shape:
    """The shape of one sample as a net sees it."""
    shape = tuple(data.x.shape[1:])
    return (shape[-1], *shape[:-1]) if data.x.dtype == torch.uint8 else shape


def standardise(pixels: Tensor, data: Data) -> Tensor:
    """Pixels in [0, 1], normalised as the data set's images are. Data without a channel mean is returned unchanged."""
    if not data.mean:
        return pixels
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (data.mean, data.std))
    return (pixels - mean) / std


def endless_batches(x: Tensor, y: Tensor, size: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a fixed set without end, reshuffled in each pass; an incomplete last batch of a pass is left out."""
    while True:
        order = torch.randperm(len(y), generator=rng)
        for chosen in torch.split(order[: max(size, len(y) // size * size)], size):
            yield x[chosen], y[chosen]


def contrast_to_virtual(z: Tensor, y: Tensor, z_v: Tensor, y_v: Tensor, tau: float) -> Tensor:
    """FedPG's Eq. 11 of normalised features, positives in the denominator too; a sample without positives adds 0."""
    s, own = normalize(z, dim=1) @ normalize(z_v, dim=1).T / tau, y[:, None] == y_v
    log_p = s.masked_fill(~own, -torch.inf).logsumexp(1) - s.logsumexp(1)
    return -torch.where(own.any(1), log_p, 0.0).mean()
