"""What advice is judged by: which models, and which measure of them, on the clients' own validation or test parts.

"Which method" has two answers. Where each client may use a model of its own, a method is judged by the model that a
client would use: its personal one if the method has such, else the global one ("own", the default). Where all must use
one model, it is judged by the global model ("global").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import IntArray
from fedskew.evaluation.figures import FIGURES, Figure
from fedskew.evaluation.metrics import BALANCED, ClientRow
from fedskew.federation.world import World

MEASURES = ("accuracy", "balanced", "f1", "auroc", "loss")
SAME = {"personal": "own:accuracy", "clients": "global:accuracy"}  # keys of figures that other commands accept
START = {"own": "personal", "global": "clients"}  # of the figures' keys


@dataclass(frozen=True)
class Goal:
    """One measure of one kind of model over clients."""

    model: Literal["own", "global"]
    measure: str  # one of MEASURES

    @property
    def figure(self) -> Figure:
        """The figure of an evaluation: the clients' mean, or of pooled predictions for balanced accuracy and loss."""
        start = START[self.model]
        ends = {"accuracy": "", "balanced": "_balanced", "f1": "_f1_mean", "auroc": "_auroc_mean", "loss": "_loss"}
        return FIGURES[start + ends[self.measure]]

    @property
    def sign(self) -> int:
        """1 where higher is better, else -1."""
        return 1 if self.figure.better == "higher" else -1

    @property
    def words(self) -> str:
        """The measure and the models in words: "balanced accuracy of the clients' own models"."""
        who = "the model that each client would use" if self.model == "own" else "the global model"
        return f"{self.figure.measure or self.measure} of {who}"

    def chance(self, samples: Sequence[int]) -> float | None:
        """What a model has that learned nothing, at best; None for a loss. `samples` are all clients', by class.

        >>> [Goal("own", measure).chance([97, 3]) for measure in ("balanced", "accuracy", "auroc")]
        [0.5, 0.97, 0.5]
        """
        known = [n for n in samples if n]
        if self.measure == "loss" or not known:
            return None
        if self.measure == "accuracy":
            return max(known) / sum(known)
        return 0.5 if self.measure == "auroc" else 1 / len(known)

    def fits(self, method: Method) -> bool:
        """Whether a method has such a model."""
        return self.model == "own" or method.has_global

    def by_client(self, rows: Mapping[str, ClientRow], counts: Mapping[int, IntArray]) -> dict[int, float]:
        """What each client contributes: values whose mean over clients is the figure. Clients without one are left out.

        `counts` are each client's samples by class. Pooled balanced accuracy is the mean over classes of correct / all
        samples, so a client contributes the sum over classes of its correct samples / all clients' samples.

        >>> from fedskew.evaluation.metrics import ModelMetrics
        >>> def row(recalls): return ClientRow(samples=2, global_=None, personal=ModelMetrics(
        ...     accuracy=0.5, loss=1.0, per_class=recalls))
        >>> rows = {"0": row([1.0, 0.0]), "1": row([0.5, None])}
        >>> Goal("own", "balanced").by_client(rows, {0: np.array([1, 1]), 1: np.array([2, 0])})
        {0: 0.3333333333333333, 1: 0.3333333333333333}
        """
        found = {int(c): row.personal if self.model == "own" else row.global_ for c, row in rows.items()}
        models = {c: model for c, model in found.items() if model is not None}
        if self.measure == "balanced":
            totals = np.sum([counts[c] for c in models], axis=0)
            share = len(models) / (np.maximum(totals, 1) * max((totals > 0).sum(), 1))
            recalls = {c: np.array([v or 0.0 for v in model.per_class]) for c, model in models.items()}
            return {c: float((recalls[c] * counts[c] * share).sum()) for c in models}
        field = {"accuracy": "accuracy", "f1": "macro_f1", "auroc": "auroc", "loss": "loss"}[self.measure]
        values = {c: getattr(model, field) for c, model in models.items()}
        return {c: float(v) for c, v in values.items() if v is not None and np.isfinite(v)}


def read_goal(text: str | None, balanced: bool) -> Goal:
    """The goal that a text stands for: `own`, `global`, a measure, or both as in `global:f1`.

    None is `own`. Without a measure it is accuracy where the samples are `balanced`, else balanced accuracy.

    >>> read_goal("global:f1", True), read_goal(None, False)
    (Goal(model='global', measure='f1'), Goal(model='own', measure='balanced'))
    """
    given = SAME.get(text or "own", text or "own")
    model, _, measure = given.partition(":") if given.partition(":")[0] in START else ("own", "", given)
    if model not in START or (measure and measure not in MEASURES):
        raise UsageError(
            f"goal '{text}' is invalid: expected own or global, with a measure if wanted ({', '.join(MEASURES)}), "
            "as in global:f1."
        )
    chosen = measure or ("accuracy" if balanced else "balanced")
    return Goal("own" if model == "own" else "global", chosen)


def class_counts(world: World, part: Literal["validation", "test"]) -> dict[int, IntArray]:
    """Samples by class in each client's validation or test part."""
    places = world.validation if part == "validation" else world.test
    clients = range(len(places.sizes()))
    return {c: np.bincount(world.y[places[c]].numpy(), minlength=world.classes) for c in clients}


def is_balanced(counts: Mapping[int, IntArray]) -> bool:
    """Whether all clients' samples together have about equally many of each class."""
    totals = np.sum(list(counts.values()), axis=0)
    return bool(totals.max() <= BALANCED * totals.min())
