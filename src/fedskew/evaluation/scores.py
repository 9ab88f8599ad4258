"""The metric vocabulary: one set of words for every method, engine and table.

    global      the server's model on the balanced test set
    clients     a model on each client's own test part, over all clients (or a stated sample):
                `global` the server's model, `personal` the one that client would deploy
    new         the same for clients that never train
    ensemble    what else the server could predict with (Method.ensemble), on the balanced test set
    groups      which classes head, middle and tail are

    accuracy, loss, per_class           of one model on one set
    head, middle, tail                  of global and ensemble: accuracy over the third of the classes with the most
                                        training samples, the rest, and the third with the fewest; told where the
                                        largest class has twice the samples of the smallest (see `thirds`)
    mean, weighted, std, worst_decile   of accuracy over clients: unweighted, by test samples,
                                        spread, and the mean of the worst tenth
Nothing here is a maximum over test rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.core.net import outputs
from fedskew.core.samples import Data, pieces

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

    def as_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "loss": self.loss / max(self.samples, 1), "per_class": per_class(self)}


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


def over_clients(scores: Sequence[Score]) -> dict[str, Any] | None:
    """Accuracy over clients that have test samples of their own; None if there is none."""
    own = [s for s in scores if s.samples]
    if not own:
        return None
    accuracy = [s.accuracy for s in own]
    mean = sum(accuracy) / len(accuracy)
    worst = sorted(accuracy)[: math.ceil(len(accuracy) / 10)]
    pooled = own[0]
    for s in own[1:]:
        pooled = pooled + s
    return {
        "mean": mean,
        "weighted": pooled.accuracy,
        "std": math.sqrt(sum((a - mean) ** 2 for a in accuracy) / len(accuracy)),
        "worst_decile": sum(worst) / len(worst),
        "loss": pooled.loss / pooled.samples,
        "per_class": per_class(pooled),
        "clients": len(own),
    }


def summary(
    test: Score | None,
    clients: Iterable[ClientScore],
    newcomers: frozenset[int],
    sampled: bool,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """One round's metrics, in the words above. `groups`: classes by their training samples, from `thirds`."""
    scores = list(clients)
    metrics: dict[str, Any] = {"groups": groups} if groups else {}
    metrics["global"] = test.as_dict() | by_third(test, groups or {}) if test is not None and test.samples else None
    for word, new in (("clients", False), ("new", True)):
        group = [s for s in scores if (s.client in newcomers) == new]
        shared = [s.shared for s in group if s.shared is not None]
        personal = over_clients([s.personal for s in group])
        metrics[word] = personal and {
            "global": over_clients(shared),
            "personal": personal,
            "never_trained": sum(s.fallback for s in group),
            "sampled": sampled,
        }
    return metrics


def per_client(scores: Iterable[ClientScore]) -> dict[str, dict[str, Any]]:
    """The table behind the summary: each client's accuracy, samples and per-class figures."""
    return {
        str(s.client): {
            "samples": s.personal.samples,
            "global": s.shared and s.shared.as_dict(),
            "personal": s.personal.as_dict(),
        }
        for s in scores
        if s.personal.samples
    }
