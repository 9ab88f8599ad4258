"""Models scored in counts, which add up exactly over clients, workers and sites, and metrics made from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedskew.core.net import outputs
from fedskew.core.samples import Data, pieces
from fedskew.evaluation.metrics import ClientMetrics, ClientRow, Metrics, ModelMetrics, Population

BATCH = 200  # samples per evaluation step: what a cache holds; fixed, because batch statistics depend on it


@dataclass(frozen=True)
class Score:
    """One model on one set of samples, in counts, so that scores add up exactly."""

    correct: tuple[int, ...]  # by class
    total: tuple[int, ...]  # by class
    loss: float  # sum over samples

    @property
    def samples(self) -> int:
        return sum(self.total)

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / max(self.samples, 1)

    def __add__(self, other: Score) -> Score:
        return Score(
            tuple(a + b for a, b in zip(self.correct, other.correct, strict=True)),
            tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            self.loss + other.loss,
        )

    def metrics(self, groups: Mapping[str, Sequence[int]] | None = None) -> ModelMetrics:
        """This score as metrics; `groups` (from `thirds`) adds the accuracy of head, middle and tail classes."""
        return ModelMetrics(
            accuracy=self.accuracy,
            loss=self.loss / max(self.samples, 1),
            per_class=per_class(self),
            **by_third(self, groups or {}),
        )


def per_class(score: Score) -> list[float | None]:
    """Accuracy by class; None where there is no sample."""
    return [c / t if t else None for c, t in zip(score.correct, score.total, strict=True)]


@dataclass(frozen=True)
class ClientScore:
    """One client's own test part: the server's model and the client's."""

    client: int
    shared: Score | None  # None: the method has no meaningful global model
    personal: Score
    fallback: bool  # this client has never trained, so nothing of its model is its own


@torch.no_grad()
def score(net: nn.Module, data: Data, classes: int, *, device: str = "cpu", batch_statistics: bool = False) -> Score:
    """A model on samples. `batch_statistics`: batch norm by the batch, for a model without statistics."""
    total = Score((0,) * classes, (0,) * classes, 0.0)
    for positions in pieces(len(data), BATCH):
        x, y = data.take(positions)
        logits = outputs(net, net, x.to(device), batch_statistics=batch_statistics)
        total = total + score_of(logits.cpu(), y, classes)
    return total


def score_of(logits: Tensor, y: Tensor, classes: int) -> Score:
    """Logits [n, classes] of samples with these labels."""
    correct = torch.bincount(y[logits.argmax(1) == y], minlength=classes)
    total = torch.bincount(y, minlength=classes)
    loss = float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    return Score(tuple(correct.tolist()), tuple(total.tolist()), loss)


def thirds(counts: Sequence[int]) -> dict[str, list[int]]:
    """Classes by their training samples: head, middle, tail; the lower number first where counts are equal.

    Head and tail are C // 3 classes each, at least one. Empty where no class has twice the samples of another: there
    is no tail to speak of.
    """
    if max(counts) < 2 * min(counts) or max(counts) == 0:
        return {}
    order, size = sorted(range(len(counts)), key=lambda c: -counts[c]), max(1, len(counts) // 3)
    parts = {"head": order[:size], "middle": order[size:-size], "tail": order[-size:]}
    return {word: sorted(classes) for word, classes in parts.items()}


def by_third(score: Score, groups: Mapping[str, Sequence[int]]) -> dict[str, float | None]:
    """Accuracy over the samples of each group of classes; None where there is no sample."""
    counts = {
        word: (sum(score.correct[c] for c in classes), sum(score.total[c] for c in classes))
        for word, classes in groups.items()
    }
    return {word: correct / total if total else None for word, (correct, total) in counts.items()}


def over_clients(scores: Sequence[Score]) -> ClientMetrics | None:
    """Metrics over clients that have test samples of their own; None if there is no such client."""
    scored = [s for s in scores if s.samples]
    if not scored:
        return None
    accuracy = [s.accuracy for s in scored]
    mean = sum(accuracy) / len(accuracy)
    worst = sorted(accuracy)[: math.ceil(len(accuracy) / 10)]
    pooled = scored[0]
    for s in scored[1:]:
        pooled = pooled + s
    return ClientMetrics(
        mean=mean,
        weighted=pooled.accuracy,
        std=math.sqrt(sum((a - mean) ** 2 for a in accuracy) / len(accuracy)),
        worst_decile=sum(worst) / len(worst),
        loss=pooled.loss / pooled.samples,
        per_class=per_class(pooled),
        clients=len(scored),
    )


def summarise(
    test: Score | None,
    clients: Iterable[ClientScore],
    newcomers: frozenset[int],
    sampled: bool,
    groups: Mapping[str, Sequence[int]],
) -> Metrics:
    """One evaluation: `test` is the server's model on its test set, `clients` the clients' own test parts.

    `newcomers` are clients that never train; `sampled` says that only some clients were evaluated; `groups` are
    head, middle and tail classes, from `thirds`.
    """
    scores = list(clients)

    def population(new: bool) -> Population | None:
        group = [s for s in scores if (s.client in newcomers) == new]
        personal = over_clients([s.personal for s in group])
        if personal is None:
            return None
        return Population(
            global_=over_clients([s.shared for s in group if s.shared is not None]),
            personal=personal,
            never_trained=sum(s.fallback for s in group),
            sampled=sampled,
        )

    return Metrics(
        global_=test.metrics(groups) if test is not None and test.samples else None,
        clients=population(False),
        new=population(True),
        groups={word: list(classes) for word, classes in groups.items()},
    )


def per_client(scores: Iterable[ClientScore]) -> dict[str, ClientRow]:
    """Each client's own figures, by client number as text; clients without test samples are left out."""
    return {
        str(s.client): ClientRow(
            samples=s.personal.samples,
            global_=None if s.shared is None else s.shared.metrics(),
            personal=s.personal.metrics(),
        )
        for s in scores
        if s.personal.samples
    }
