"""FedCD's fine classes, M per class: their classifier, their losses, and how samples are assigned to them.

Fine class m of class c has the index j = c M + m. Prototypes are dense over all C M fine classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, one_hot

from fedskew.core.site import copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.methods._shared.heads import linear_start
from fedskew.methods._shared.prototypes import class_means

FINE = "fine"  # group of the payload: all class-vectors of each class but the first
LLOYD = 20  # largest number of steps of k-means


class FineHead(nn.Module):
    """A linear classifier of fine classes: a class's logit is the sum of its M. Holds the trainable prototypes too."""

    def __init__(self, phi: Tensors, prototypes: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(phi["weight"])  # [C, M, d]
        self.bias = nn.Parameter(phi["bias"]) if "bias" in phi else None  # [C, M]
        self.prototypes = nn.Parameter(prototypes)  # [C M, d]

    def forward(self, z: Tensor) -> Tensor:
        return linear(z, self.weight.sum(1), None if self.bias is None else self.bias.sum(1))

    def phi(self) -> Tensors:
        """Copies of the class-vectors, and of the bias where there is one."""
        return Tensors({name: copied(p) for name, p in self.named_parameters() if name != "prototypes"})


def split_head(head: nn.Linear, M: int, rng: torch.Generator, *, bias: bool) -> Tensors:
    """M class-vectors for each row of a head: the row itself, and M - 1 with initial values as nn.Linear's."""
    phi = Tensors()
    for name, first in head.named_parameters():
        if bias or name != "bias":
            others = linear_start((len(first), M - 1, *first.shape[1:]), head.in_features, rng)
            phi[name] = torch.cat([copied(first)[:, None], others], 1)
    return phi


def fold(phi: Tensors) -> Payload:
    """Class-vectors as a payload: their sums as a plain head, and all but the first of each class in the group FINE."""
    head = Tensors({f"head.{name}": t.sum(1) for name, t in phi.items()})
    return {"parameters": head, FINE: Tensors({name: t[:, 1:].clone() for name, t in phi.items()})}


def unfold(model: Payload) -> Tensors:
    """The inverse of `fold`: the first class-vector is the head minus the others."""
    head = model["parameters"]
    return Tensors(
        {name: torch.cat([(head[f"head.{name}"] - t.sum(1))[:, None], t], 1) for name, t in model[FINE].items()}
    )


def log_quality(phi: Tensors, prototypes: Tensor) -> Tensor:
    """log q (Eq. 13): the log-probability that a classifier gives to each prototype's own fine class, [C M]."""
    bias = phi["bias"].flatten() if "bias" in phi else None
    return linear(prototypes, phi["weight"].flatten(0, 1), bias).log_softmax(1).diagonal()


def client_weights(log_q: Tensor, temperature: float, *, norm: bool) -> Tensor:
    """Weights over clients, the first dimension: softmax(q / temperature) (Eq. 14), or q / sum q if `norm`."""
    return (log_q if norm else log_q.exp() / temperature).softmax(0)


def combine_classifiers(phis: Sequence[Tensors], nu: Tensor) -> Tensors:
    """Eq. 15: the weighted sum of the clients' class-vectors; nu [clients, C, M]."""
    stacks = {name: torch.stack([phi[name] for phi in phis]) for name in phis[0]}
    return Tensors({name: torch.einsum("kcm,kcm...->cm...", nu.to(t), t) for name, t in stacks.items()})


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


def of_class_means(logits: Tensor, y: Tensor) -> Tensor:
    """L_bpr (Eq. 6 and 7): cross entropy of each class's mean feature, mean over the classes of the batch.

    Takes a linear classifier's logits of the samples: the logits of a mean are the mean of the logits.
    """
    members = one_hot(y, logits.shape[1]).to(logits.dtype).T  # [C, B]
    count = members.sum(1)
    means = members @ logits / count.clamp(min=1)[:, None]
    return cross_entropy(means, torch.arange(len(means), device=y.device), weight=(count > 0).to(logits.dtype))


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
