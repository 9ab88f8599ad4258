"""Class prototypes: the mean feature of each class at a site, and their mean over clients.

Prototypes are dense, so that those of all clients have one shape: `mean` [classes, features] and `count` [classes], the
number of samples behind each mean. A class without samples has count 0 and a mean of zeros, which is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.site import Site
from fedskew.core.tensors import Tensors

GROUP = "prototypes"  # group of the payload


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensors:
    """Prototypes of features [n, d] with labels [n], summed in double precision."""
    count = torch.bincount(labels, minlength=classes)
    total = torch.zeros(classes, features.shape[1], dtype=torch.float64).index_add_(0, labels, features.double())
    return Tensors(mean=(total / count.clamp(min=1)[:, None]).to(features.dtype), count=count.float())


def enough(of: Tensors, least: int) -> Tensors:
    """Class statistics [classes, ...] with a `count`; zeros and count 0 for classes of fewer than `least` samples.

    The mean feature of one sample is that sample's: what too few samples are behind must not leave a site.
    """
    kept = of["count"] >= max(least, 1)
    return Tensors({name: torch.where(kept.view(-1, *[1] * (t.dim() - 1)), t, 0) for name, t in of.items()})


def prototypes_of(site: Site) -> Tensors:
    """Prototypes of the site's data under the model in its net, in evaluation mode, without augmentation.

    A class of fewer than `site.min_count` samples has none.
    """
    return enough(class_means(site.infer(site.net.body), site.data.labels, site.classes), site.min_count)


def no_prototypes(site: Site) -> Tensors:
    """Prototypes with count 0 for every class: the start of the server, and what a client without any sends."""
    return Tensors(mean=torch.zeros(site.classes, site.net.features), count=torch.zeros(site.classes))


def some_of_each(labels: Tensor, m: int, rng: torch.Generator) -> Tensor:
    """Positions of m random samples of each class, or of all where there are fewer."""
    order = torch.randperm(len(labels), generator=rng)
    order = order[labels[order].argsort(stable=True)]  # sorted by class, in random order within each
    count = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (count.cumsum(0) - count)[labels[order]]
    return order[rank < m]


class PrototypeMean:
    """The mean of the clients' prototypes, class by class, over a stream; memory does not grow with the cohort.

    Clients are weighted by their samples of the class, or equally if `uniform`. `count` is the sum of their counts. A
    class that no client sent keeps its entry of `old`.
    """

    def __init__(self, old: Tensors, *, uniform: bool = False) -> None:
        self.old, self.uniform = old, uniform
        self.total = torch.zeros_like(old["mean"], dtype=torch.float64)
        self.weight = torch.zeros_like(old["count"], dtype=torch.float64)
        self.count = self.weight.clone()

    def add(self, sent: Tensors) -> None:
        """Take one client's prototypes into the mean."""
        count = sent["count"].double()
        weight = (count > 0).double() if self.uniform else count
        self.total += weight[:, None] * sent["mean"]
        self.weight += weight
        self.count += count

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Pass the updates on unchanged and `add` the prototypes of each: a stream can be read only once."""
        for update in updates:
            self.add(update.payload[GROUP])
            yield update

    def value(self) -> Tensors:
        """The prototypes after all that were added."""
        known = self.count > 0
        mean = (self.total / self.weight.clamp(min=1)[:, None]).to(self.old["mean"].dtype)
        return Tensors(
            mean=torch.where(known[:, None], mean, self.old["mean"]),
            count=torch.where(known, self.count.float(), self.old["count"]),
        )
