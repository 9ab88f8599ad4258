"""Feature skews: what makes the inputs of one client differ from those of another. They move no sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from msgspec import Meta

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


FEATURES: dict[str, type[Feature]] = {"noise": Noise, "rotate": Rotate}
