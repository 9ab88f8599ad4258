"""Fine-grained classes, M to a class: their classifier, their losses, and which of them a sample is of.

Fine class m of class c is j = c M + m. Prototypes are dense as in `prototypes`, over all C M of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, one_hot

from fedskew.core.site import copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.methods._shared.prototypes import class_means

FINE = "fine"  # group of the payload: every class's vectors but the first
LLOYD = 20  # steps at most


class FineHead(nn.Module):
    """A linear classifier of fine classes; a class's logit is the sum of its M. Prototypes that train ride along."""

    def __init__(self, phi: Tensors, prototypes: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(phi["weight"])  # [C, M, d]
        self.bias = nn.Parameter(phi["bias"]) if "bias" in phi else None  # [C, M]
        self.prototypes = nn.Parameter(prototypes)  # [C M, d]

    def forward(self, z: Tensor) -> Tensor:
        return linear(z, self.weight.sum(1), None if self.bias is None else self.bias.sum(1))

    def phi(self) -> Tensors:
        return Tensors({name: copied(p) for name, p in self.named_parameters() if name != "prototypes"})


def spread(head: nn.Linear, M: int, rng: torch.Generator, *, bias: bool) -> Tensors:
    """M class-vectors for each of a head's: its own, and M - 1 drawn as nn.Linear draws them."""
    phi = Tensors()
    for name, first in head.named_parameters():
        if bias or name != "bias":
            others = torch.rand(len(first), M - 1, *first.shape[1:], generator=rng) * 2 - 1
            phi[name] = torch.cat([copied(first)[:, None], others / head.in_features**0.5], 1)
    return phi


def fold(phi: Tensors) -> Payload:
    """Class-vectors as a plain head, which any net can use: their sum; and what must travel beside it."""
    head = Tensors({f"head.{name}": t.sum(1) for name, t in phi.items()})
    return {"parameters": head, FINE: Tensors({name: t[:, 1:].clone() for name, t in phi.items()})}


def unfold(model: Payload) -> Tensors:
    """The inverse of `fold`: the first class-vector is what the others leave of the head."""
    head = model["parameters"]
    return Tensors(
        {name: torch.cat([(head[f"head.{name}"] - t.sum(1))[:, None], t], 1) for name, t in model[FINE].items()}
    )


def log_quality(phi: Tensors, prototypes: Tensor) -> Tensor:
    """Log of the probability, among all fine classes, that a classifier gives each prototype's own; [C M]."""
    bias = phi["bias"].flatten() if "bias" in phi else None
    return linear(prototypes, phi["weight"].flatten(0, 1), bias).log_softmax(1).diagonal()


def adaptive(log_q: Tensor, temperature: float, *, norm: bool) -> Tensor:
    """Weights over clients, the first dimension, by the softmax of quality; `norm`: q / sum q."""
    return (log_q if norm else log_q.exp() / temperature).softmax(0)


def combined(phis: Sequence[Tensors], nu: Tensor) -> Tensors:
    """The clients' class-vectors, each with its own weights; nu [clients, C, M]."""
    stacks = {name: torch.stack([phi[name] for phi in phis]) for name in phis[0]}
    return Tensors({name: torch.einsum("kcm,kcm...->cm...", nu.to(t), t) for name, t in stacks.items()})


def hierarchy(known: Tensor, M: int, alpha: float) -> Tensor:
    """Logs of a prototype's factor, [fine class of z, prototype]: own 1, of the own class alpha, others 1 - alpha."""
    c = torch.arange(len(known), device=known.device) // M
    factor = torch.where(c[:, None] == c, alpha, 1 - alpha).fill_diagonal_(1.0)
    return factor.log().masked_fill(~known, -torch.inf)


def contrast(z: Tensor, fine: Tensor, prototypes: Tensor, factors: Tensor, tau: float) -> Tensor:
    """-log of the own prototype's share of all exp(cos / tau) times their factors, one value a sample."""
    cosine = normalize(z, dim=1) @ normalize(prototypes, dim=1).T
    return cross_entropy(cosine / tau + factors[fine], fine, reduction="none")


def of_class_means(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each class's mean feature, the mean over classes, from a linear classifier's logits of samples.

    The logits of a mean are the mean of the logits.
    """
    members = one_hot(y, logits.shape[1]).to(logits.dtype).T  # [C, B]
    count = members.sum(1)
    means = members @ logits / count.clamp(min=1)[:, None]
    return cross_entropy(means, torch.arange(len(means), device=y.device), weight=(count > 0).to(logits.dtype))


def assigned(z: Tensor, y: Tensor, g: Tensors, M: int, rng: torch.Generator) -> tuple[Tensor, Tensors]:
    """The fine class of each sample, and the prototypes to start from, with which of them are known.

    Classes without any known prototype get the centres of k-means on their samples.
    """
    known = g["known"]
    fine = most_similar(z, y, g["mean"], known, M)
    new = ~known.view(-1, M).any(1)[y]
    if new.any():
        fine[new] = k_means(z[new], y[new], len(known) // M, M, rng)
    own = class_means(z[new], fine[new], len(known))
    return fine, Tensors(mean=torch.where(known[:, None], g["mean"], own["mean"]), known=known | (own["count"] > 0))


def most_similar(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, M: int) -> Tensor:
    """The fine class of each sample: of its class's known prototypes the one of largest cosine."""
    return _best(z @ normalize(prototypes, dim=1).T, y, known, M)


def k_means(z: Tensor, y: Tensor, classes: int, M: int, rng: torch.Generator) -> Tensor:
    """The fine class of each sample by k-means within every class at once, from min(M, n_c) of its samples."""
    order = torch.randperm(len(y), generator=rng) if M > 1 else torch.arange(len(y))  # one mean needs no start
    order = order[y[order].argsort(stable=True)]  # class by class, at random within each
    count = torch.bincount(y, minlength=classes)
    rank = torch.arange(len(y)) - (count.cumsum(0) - count)[y[order]]
    first, m = order[rank < M], rank[rank < M]
    return lloyd(z, y, _closest(z, y, class_means(z[first], y[first] * M + m, classes * M), M), classes, M)


def lloyd(z: Tensor, y: Tensor, fine: Tensor, classes: int, M: int) -> Tensor:
    """Lloyd's steps from a partition. A cluster that loses its last sample is gone."""
    for _ in range(LLOYD):
        before, fine = fine, _closest(z, y, class_means(z, fine, classes * M), M)
        if torch.equal(fine, before):
            break
    return fine


def _closest(z: Tensor, y: Tensor, centres: Tensors, M: int) -> Tensor:
    mean = centres["mean"]
    return _best(z @ mean.T - mean.square().sum(1) / 2, y, centres["count"] > 0, M)  # |z - p|^2 = |z|^2 - 2 (...)


def _best(scores: Tensor, y: Tensor, known: Tensor, M: int) -> Tensor:
    """Of each sample's class the known fine class of highest score [n, C M]."""
    own = scores.masked_fill(~known, -torch.inf).view(len(y), -1, M)[torch.arange(len(y)), y]
    return y * M + own.argmax(1)
