"""Class prototypes: the mean feature of each class at a site, and their pooling over clients.

Dense, so that every client's have one shape: `mean` [classes, features] and `count` [classes], the
samples behind each mean. A class without samples has count 0, and a mean of zeros that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fedskew.core.method import Update
from fedskew.core.site import Site
from fedskew.core.tensors import Tensors

GROUP = "prototypes"  # of the payload they travel in


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensors:
    count = torch.bincount(labels, minlength=classes)
    total = torch.zeros(classes, features.shape[1], dtype=torch.float64).index_add_(0, labels, features.double())
    return Tensors(mean=(total / count.clamp(min=1)[:, None]).to(features.dtype), count=count.float())


def prototypes_of(site: Site) -> Tensors:
    """The prototypes of the site's data under the model in its net: evaluation mode, nothing augmented."""
    return class_means(site.infer(site.net.body), site.data.labels, site.classes)


def no_prototypes(site: Site) -> Tensors:
    return Tensors(mean=torch.zeros(site.classes, site.net.features), count=torch.zeros(site.classes))


class Pool:
    """Prototypes of a stream of clients, class by class; memory does not grow with the cohort.

    The mean is by samples, or `uniform` over the clients that hold the class; `count` is the samples
    behind it. A class that nobody sent stays as it was in `old`.
    """

    def __init__(self, old: Tensors, *, uniform: bool = False) -> None:
        self.old, self.uniform = old, uniform
        self.total = torch.zeros_like(old["mean"], dtype=torch.float64)
        self.weight = torch.zeros_like(old["count"], dtype=torch.float64)
        self.count = self.weight.clone()

    def add(self, own: Tensors) -> None:
        count = own["count"].double()
        weight = (count > 0).double() if self.uniform else count
        self.total += weight[:, None] * own["mean"]
        self.weight += weight
        self.count += count

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """The updates as they come, each one's prototypes added in passing: a stream is read only once."""
        for update in updates:
            self.add(update.payload[GROUP])
            yield update

    def value(self) -> Tensors:
        sent = self.count > 0
        mean = (self.total / self.weight.clamp(min=1)[:, None]).to(self.old["mean"].dtype)
        return Tensors(
            mean=torch.where(sent[:, None], mean, self.old["mean"]),
            count=torch.where(sent, self.count.float(), self.old["count"]),
        )
