"""Models scored in counts, which add up exactly over clients, workers and sites, and metrics made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.core.net import outputs
from fedskew.core.samples import Data, pieces, take_together, to_device
from fedskew.evaluation.bins import IntArray, Predictions
from fedskew.evaluation.counts import Counts
from fedskew.evaluation.metrics import ModelMetrics

BATCH = 200  # samples per evaluation step: what a cache holds; fixed, because batch statistics depend on it
LONG_TAIL = 2  # classes have a head and a tail if the largest has at least so many times the samples of the smallest
SMALL = 20_000  # scores (samples times classes) that are counted together with those of other clients, not at once


@dataclass(frozen=True)
class Score:
    """One model on one set of samples, in counts, so that scores add up exactly."""

    correct: tuple[int, ...]  # by class
    total: tuple[int, ...]  # by class
    loss: float  # sum over samples
    # its predictions, counted or still to be counted; None: not kept, or sent by a site that does not count them
    made: Counts | Predictions | None = field(default=None, compare=False)
    predicted: tuple[int, ...] = field(default=(), compare=False)  # by class, where `made` is not kept any more
    auroc: float | None = field(default=None, compare=False)  # likewise

    @property
    def samples(self) -> int:
        return sum(self.total)

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / max(self.samples, 1)

    @property
    def counts(self) -> Counts | None:
        """The counted predictions; None if they are not kept."""
        return Counts.of(self.made) if isinstance(self.made, Predictions) else self.made

    def metrics(self, groups: Mapping[str, Sequence[int]] | None = None) -> ModelMetrics:
        """This score as metrics; `groups` (from `thirds`) adds the accuracy of head, middle and tail classes."""
        counts = self.counts
        more: dict[str, Any] = dict(by_third(self, groups or {}))
        if counts is None:
            more |= {"auroc": self.auroc, **class_figures(self.correct, self.total, self.predicted)}
        else:
            more |= detail(counts)
        return ModelMetrics(
            accuracy=self.accuracy,
            loss=self.loss / max(self.samples, 1),
            per_class=per_class(self),
            **more,
        )


def detail(counts: Counts) -> dict[str, Any]:
    """The fields of `Detail` that predictions have, except `per_class`."""
    total, predicted, correct = counts.by_class
    return {
        "samples": total,
        "predicted": predicted,
        **class_figures(correct, total, predicted),
        "auroc": counts.auroc,
        "auprc": counts.auprc,
        "ece": counts.ece if any(total) else None,
    }


def class_figures(correct: Sequence[int], total: Sequence[int], predicted: Sequence[int]) -> dict[str, float | None]:
    """Balanced accuracy, macro and weighted F1 from counts by class, as scikit-learn defines them.

    F1 counts as 0 where precision and recall are. Nothing is known without `predicted`.

    >>> class_figures([9, 1], [10, 2], [10, 2])
    {'balanced_accuracy': 0.7, 'macro_f1': 0.7, 'weighted_f1': 0.8333333333333334}
    """
    if not predicted or not sum(total):
        return {}
    recalls = [c / t for c, t in zip(correct, total, strict=True) if t]
    rows = [(2 * c / (t + p), t) for c, t, p in zip(correct, total, predicted, strict=True) if t + p]
    return {
        "balanced_accuracy": sum(recalls) / len(recalls),
        "macro_f1": sum(f1 for f1, _ in rows) / len(rows),
        "weighted_f1": sum(f1 * t for f1, t in rows) / sum(total),
    }


def per_class(score: Score) -> list[float | None]:
    """Accuracy by class; None where there is no sample."""
    return [c / t if t else None for c, t in zip(score.correct, score.total, strict=True)]


@dataclass(frozen=True)
class ClientScore:
    """One client's own test part: the server's model and the client's."""

    client: int
    shared: Score | None  # None: the method has no meaningful global model
    personal: Score  # the same object as `shared` if the client uses the server's model
    fallback: bool  # this client has never trained, so nothing of its model is its own


@torch.no_grad()
def score(net: nn.Module, data: Data, classes: int, *, device: str = "cpu", batch_statistics: bool = False) -> Score:
    """A model on samples. `batch_statistics`: batch norm by the batch, for a model without statistics."""
    parts, loss = [], 0.0
    for positions in pieces(len(data), BATCH):
        x, y = data.take(positions)
        logits = outputs(net, net, to_device(x, device), batch_statistics=batch_statistics)
        made, batch_loss = predictions(logits.cpu(), y)
        parts.append(made)
        loss += batch_loss
    if not parts:
        return Score((0,) * classes, (0,) * classes, 0.0)
    return _score(Predictions.cat(parts), loss, classes)


class Together(NamedTuple):
    """The same model on the test parts of several clients, evaluated as one stream of batches."""

    made: Predictions | None  # of all clients, one after the other; None: not kept
    sizes: list[int]  # each client's samples
    losses: list[float]  # each client's sum over samples

    def by_class(self) -> tuple[IntArray, IntArray]:
        """The correct samples and all samples of each client, by class.  # [clients, classes]"""
        assert self.made is not None
        classes, y = self.made.log_p.shape[1], self.made.y.numpy()
        place = np.repeat(np.arange(len(self.sizes)) * classes, self.sizes) + y
        right, cells = self.made.predicted.numpy() == y, len(self.sizes) * classes
        correct, total = np.bincount(place[right], minlength=cells), np.bincount(place, minlength=cells)
        return correct.reshape(-1, classes), total.reshape(-1, classes)

    def scores(self) -> list[Score]:
        """The score of each client."""
        assert self.made is not None
        parts = zip(*(torch.split(tensor, self.sizes) for tensor in self.made), strict=True)
        rows = zip(*(table.tolist() for table in self.by_class()), self.losses, parts, strict=True)
        return [Score(tuple(c), tuple(t), loss, Predictions(*part)) for c, t, loss, part in rows]


@torch.no_grad()
def score_together(net: nn.Module, parts: Sequence[Data], *, device: str = "cpu") -> Together:
    """A model on the samples of several clients, none of which has more than BATCH of them.

    Clients share batches, so this is only for nets whose outputs do not depend on the rest of the batch.
    """
    made, start, sizes = [], 0, [len(part) for part in parts]
    while start < len(parts):
        end, count = start, 0
        while end < len(parts) and count + sizes[end] <= BATCH:
            count += sizes[end]
            end += 1
        x, y = take_together(parts[start:end])
        logits = outputs(net, net, to_device(x, device), batch_statistics=False)
        made.append(predictions(logits.cpu(), y)[0])
        start = end
    whole = Predictions.cat(made)
    each = torch.split(whole.log_p.gather(1, whole.y[:, None])[:, 0].double(), sizes)
    return Together(whole, sizes, [-float(losses.sum()) for losses in each])


def score_of(logits: Tensor, y: Tensor, classes: int) -> Score:
    """Logits [n, classes] of samples with these labels."""
    return _score(*predictions(logits, y), classes)


def predictions(logits: Tensor, y: Tensor) -> tuple[Predictions, float]:
    """What logits [n, classes] say about samples with these labels, and the sum of their cross entropies."""
    log_p = logits.log_softmax(1)
    loss = float(nn.functional.nll_loss(log_p, y, reduction="sum"))
    return Predictions(log_p.float(), y, logits.argmax(1)), loss


def _score(made: Predictions, loss: float, classes: int) -> Score:
    y = made.y.numpy()
    correct, total = (np.bincount(of, minlength=classes) for of in (y[made.predicted.numpy() == y], y))
    kept = made if made.log_p.numel() <= SMALL else Counts.of(made)
    return Score(tuple(correct.tolist()), tuple(total.tolist()), loss, kept)


def thirds(counts: Sequence[int]) -> dict[str, list[int]]:
    """Classes by their training samples: head, middle, tail; the lower number first where counts are equal.

    Head and tail are C // 3 classes each, at least one. Empty where no class has twice the samples of another: there
    is no tail to speak of.
    """
    if max(counts) < LONG_TAIL * min(counts) or max(counts) == 0:
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
