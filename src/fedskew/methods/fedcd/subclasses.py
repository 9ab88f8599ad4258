"""FedCD's fine classes, M per class: their classifier, their losses, and how samples are assigned to them.

Fine class m of class c has the index j = c M + m. Prototypes are dense over all C M fine classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, one_hot

from fedskew.core.site import copied
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.heads import linear_start
from fedskew.methods._shared.prototypes import class_means

LLOYD = 20  # largest number of steps of k-means
Over = Literal["logits", "probabilities"]


class FineHead(nn.Module):
    """A head of M class-vectors for each class: weight [C M, d], bias [C M] or None. With M = 1 a plain linear head.

    over: "logits": a class's logit is the sum of its M. "probabilities": a class's probability is the sum of its M, so
    its logit is their logsumexp.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, M: int, over: Over) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.M, self.over = M, over

    def forward(self, z: Tensor) -> Tensor:
        if self.over == "probabilities":
            return linear(z, self.weight, self.bias).view(len(z), -1, self.M).logsumexp(2)
        weight = self.weight.view(-1, self.M, z.shape[1]).sum(1)
        return linear(z, weight, None if self.bias is None else self.bias.view(-1, self.M).sum(1))


class GuidedHead(nn.Module):
    """A head and the prototypes that are trained with it."""

    def __init__(self, head: nn.Module, prototypes: Tensor) -> None:
        super().__init__()
        self.head = head
        self.guides = nn.ParameterList([prototypes])  # a list, so that they come after the head's parameters

    @property
    def prototypes(self) -> Tensor:
        """The prototypes [C M, d]."""
        return cast(Tensor, self.guides[0])

    def forward(self, z: Tensor) -> Tensor:
        return cast(Tensor, self.head(z))


def split_head(head: nn.Linear, M: int, rng: torch.Generator, *, bias: bool, over: Over) -> FineHead:
    """M class-vectors for each row of a head: the row itself, and M - 1 with initial values as nn.Linear's."""

    def split(first: Tensor) -> Tensor:
        others = linear_start((len(first), M - 1, *first.shape[1:]), head.in_features, rng)
        return torch.cat([copied(first)[:, None], others], 1).flatten(0, 1)

    b = torch.zeros(head.out_features) if head.bias is None else head.bias
    return FineHead(split(head.weight), split(b) if bias else None, M, over)


def log_quality(phi: Tensors, prototypes: Tensor) -> Tensor:
    """log q (Eq. 13): the log-probability that a classifier gives to each prototype's own fine class, [C M]."""
    return linear(prototypes, phi["head.weight"], phi.get("head.bias")).log_softmax(1).diagonal()


def client_weights(log_q: Tensor, temperature: float, *, norm: bool) -> Tensor:
    """Weights over clients, the first dimension: softmax(q / temperature) (Eq. 14), or q / sum q if `norm`."""
    return (log_q if norm else log_q.exp() / temperature).softmax(0)


def combine_classifiers(phis: Sequence[Tensors], nu: Tensor) -> Tensors:
    """Eq. 15: the weighted sum of the clients' class-vectors; nu [clients, C M]."""
    stacks = {name: torch.stack([phi[name] for phi in phis]) for name in phis[0]}
    return Tensors({name: torch.einsum("kj,kj...->j...", nu.to(t), t) for name, t in stacks.items()})


def drawn_prototypes(count: Tensor, batch: int, samples: int, rng: torch.Generator) -> Tensor:
    """The prototypes in a batch of Algorithm 1, whose batches are of D_k^+: a prototype is one item of an epoch.

    Each known one (count > 0) is in a batch of `batch` out of `samples` with probability batch / samples.
    """
    here = torch.rand(len(count), generator=rng).to(count.device) < batch / samples
    return (here & (count > 0)).nonzero().flatten()


def hierarchy(known: Tensor, M: int, alpha: float) -> Tensor:
    """Logs of the factors in Eq. 3, [fine class of z, prototype].

    The factor is 1 for the own prototype, alpha for others of the same class, 1 - alpha for other classes, and 0 for
    prototypes that are not known.
    """
    c = torch.arange(len(known), device=known.device) // M
    factor = torch.where(c[:, None] == c, alpha, 1 - alpha).fill_diagonal_(1.0)
    return factor.log().masked_fill(~known, -torch.inf)


def hierarchical_contrast(z: Tensor, fine: Tensor, prototypes: Tensor, factors: Tensor, tau: float) -> Tensor:
    """-log omega (Eq. 3 and 4), one value per sample; `factors` are those of `hierarchy`."""
    cosine = normalize(z, dim=1) @ normalize(prototypes, dim=1).T
    return cross_entropy(cosine / tau + factors[fine], fine, reduction="none")


def of_class_means(z: Tensor, y: Tensor, classes: int, classifier: Callable[[Tensor], Tensor]) -> Tensor:
    """L_bpr (Eq. 6 and 7): cross entropy of each class's mean feature, mean over the classes of the batch."""
    members = one_hot(y, classes).to(z.dtype).T  # [C, B]
    count = members.sum(1)
    logits = classifier(members @ z / count.clamp(min=1)[:, None])
    return cross_entropy(logits, torch.arange(classes, device=y.device), weight=(count > 0).to(z.dtype))


def assign_fine_classes(z: Tensor, y: Tensor, g: Tensors, M: int, rng: torch.Generator) -> tuple[Tensor, Tensors]:
    """The fine class of each sample, and the prototypes to start from as `mean` and `known`.

    A class without known prototypes gets k-means centres of its samples.
    """
    known = g["known"]
    fine = most_similar(z, y, g["mean"], known, M)
    new = ~known.view(-1, M).any(1)[y]
    if new.any():
        fine[new] = k_means(z[new], y[new], len(known) // M, M, rng)
    centres = class_means(z[new], fine[new], len(known))
    start = torch.where(known[:, None], g["mean"], centres["mean"])
    return fine, Tensors(mean=start, known=known | (centres["count"] > 0))


def most_similar(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, M: int) -> Tensor:
    """Eq. 2: the fine class of each sample, which has the largest cosine among the known prototypes of its class."""
    return _best(z @ normalize(prototypes, dim=1).T, y, known, M)


def k_means(z: Tensor, y: Tensor, classes: int, M: int, rng: torch.Generator) -> Tensor:
    """The fine class of each sample by k-means within each class, started from min(M, n_c) random samples of it."""
    order = torch.randperm(len(y), generator=rng) if M > 1 else torch.arange(len(y))  # one centre needs no random start
    order = order[y[order].argsort(stable=True)]  # sorted by class, in random order within each
    count = torch.bincount(y, minlength=classes)
    rank = torch.arange(len(y)) - (count.cumsum(0) - count)[y[order]]
    first, m = order[rank < M], rank[rank < M]
    return lloyd(z, y, _closest(z, y, class_means(z[first], y[first] * M + m, classes * M), M), classes, M)


def lloyd(z: Tensor, y: Tensor, fine: Tensor, classes: int, M: int) -> Tensor:
    """Lloyd's algorithm from a given assignment. A cluster that loses its last sample disappears."""
    for _ in range(LLOYD):
        before, fine = fine, _closest(z, y, class_means(z, fine, classes * M), M)
        if torch.equal(fine, before):
            break
    return fine


def _closest(z: Tensor, y: Tensor, centres: Tensors, M: int) -> Tensor:
    """For each sample the fine class of its class with the nearest centre."""
    mean = centres["mean"]
    return _best(z @ mean.T - mean.square().sum(1) / 2, y, centres["count"] > 0, M)  # |z - p|^2 = |z|^2 - 2 (...)


def _best(scores: Tensor, y: Tensor, known: Tensor, M: int) -> Tensor:
    """For each sample the known fine class of its class with the highest score; scores [n, C M]."""
    candidates = scores.masked_fill(~known, -torch.inf).view(len(y), -1, M)[torch.arange(len(y)), y]
    return y * M + candidates.argmax(1)
