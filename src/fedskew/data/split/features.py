"""Skews beyond who has which samples: what makes the inputs or the meaning of labels of one client differ.

They move no sample. Noise and rotation are applied batch by batch; `changed_samples` applies the others once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import Count
from fedskew.data.split.partition import Partition


class Feature(Protocol):
    """A partition -> the same partition with a property of each client's inputs set."""

    def __call__(self, partition: Partition) -> Partition: ...


@dataclass(frozen=True)
class Noise:
    """Client i of N adds Gaussian noise of standard deviation level * i/(N-1) to its inputs."""

    level: Annotated[float, Meta(ge=0, le=1000)] = 0.1

    def __call__(self, partition: Partition) -> Partition:
        clients = len(partition.clients)
        return replace(partition, noise=tuple(self.level * i / max(clients - 1, 1) for i in range(clients)))


@dataclass(frozen=True)
class Rotate:
    """Client i turns its inputs by (i mod turns) * 360/turns degrees."""

    turns: Count = 4

    def __call__(self, partition: Partition) -> Partition:
        clients = len(partition.clients)
        return replace(partition, rotation=tuple(i % self.turns * 360 / self.turns for i in range(clients)))


@dataclass(frozen=True)
class Colour:
    """Client i of N has a colour cast s from -level to level: red times 1 + s, blue times 1 - s. Images only.

    Grey images are brighter or darker.
    """

    level: Annotated[float, Meta(ge=0, lt=1)] = 0.5

    def __call__(self, partition: Partition) -> Partition:
        clients = len(partition.clients)
        casts = (self.level * (2 * i / max(clients - 1, 1) - 1) for i in range(clients))
        return replace(partition, colour=tuple(casts))


@dataclass(frozen=True)
class Resolution:
    """Client i sees its images at 1 / 2^(i mod levels) of their resolution, enlarged to the old size. Images only."""

    levels: Annotated[int, Meta(ge=1, le=6)] = 3

    def __call__(self, partition: Partition) -> Partition:
        return replace(partition, resolution=tuple(2 ** (i % self.levels) for i in range(len(partition.clients))))


@dataclass(frozen=True)
class Concept:
    """Clients in `groups` groups disagree on labels: client i calls class c by (c + i mod groups) mod C.

    The server's test set keeps its labels, which are those of the first group.
    """

    groups: Annotated[int, Meta(ge=2)] = 2

    def __call__(self, partition: Partition) -> Partition:
        return replace(partition, concept=tuple(i % self.groups for i in range(len(partition.clients))))


FEATURES: dict[str, type[Feature]] = {
    "noise": Noise,
    "rotate": Rotate,
    "colour": Colour,
    "resolution": Resolution,
    "concept": Concept,
}

Array = npt.NDArray[Any]


def changed_samples(x: Array, y: Array, partition: Partition, classes: int) -> tuple[Array, Array]:
    """The pool's inputs and labels with the clients' colour, resolution and concept; the given arrays stay as they are.

    Images are uint8 [n, h, w, c].
    """
    looks = partition.colour is not None or partition.resolution is not None
    if not looks and partition.concept is None:
        return x, y
    if sum(map(len, partition.clients)) != len(np.unique(np.concatenate(partition.clients))):
        raise UsageError("colour, resolution and concept need a split in which no two clients share a sample.")
    if looks and (x.dtype != np.uint8 or x.ndim != 4):
        raise UsageError("colour and resolution change images: expected a data set of images.")
    x, y = (x.copy() if looks else x), y.copy()
    for i, samples in enumerate(partition.clients):
        if partition.colour is not None:
            x[samples] = with_cast(x[samples], partition.colour[i])
        if partition.resolution is not None:
            x[samples] = at_resolution(x[samples], partition.resolution[i])
        if partition.concept is not None:
            y[samples] = (y[samples] + partition.concept[i]) % classes
    return x, y


def with_cast(images: Array, cast: float) -> Array:
    """Images [n, h, w, c] with red (or grey) times 1 + cast and blue times 1 - cast, cut at 255."""
    gain = np.ones(images.shape[3], np.float32)
    gain[0] += cast
    if len(gain) > 1:
        gain[-1] -= cast
    return np.minimum(np.rint(images * gain), 255).astype(np.uint8)


def at_resolution(images: Array, factor: int) -> Array:
    """Images [n, h, w, c] in which every block of factor x factor pixels has its mean; smaller blocks at the edges."""
    if factor == 1:
        return images
    made = images.astype(np.float32)
    for axis in (1, 2):
        starts = np.arange(0, images.shape[axis], factor)
        sizes = np.diff(np.append(starts, images.shape[axis]))
        shape = [-1 if a == axis else 1 for a in range(4)]
        made = np.repeat(np.add.reduceat(made, starts, axis) / sizes.reshape(shape), sizes, axis)
    return np.rint(made).astype(np.uint8)
