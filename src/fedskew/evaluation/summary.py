"""Scores of many clients, added one after another, and the metrics of one evaluation made from them.

A client's predictions are counted together with those of others, which is faster for small clients; afterwards only a
few numbers of each client are kept, so memory does not grow with clients times classes squared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedskew.evaluation.counts import Counts, FloatArray, Predictions, part_aurocs, score_places
from fedskew.evaluation.metrics import ClientMetrics, ClientRow, Metrics, Over, Population, Spread
from fedskew.evaluation.scores import ClientScore, Score, detail, per_class

MOST_CLASSES = 300  # of a confusion table that is kept
TOGETHER = 200_000  # scores (samples times classes) that are counted in one go


class Tally:
    """Scores of one kind of model, added one at a time."""

    def __init__(self) -> None:
        self.parts: list[Score] = []  # of the clients, in the order they were added, without their predictions
        self.counts: Counts | None = None  # the sum of those that are counted; None: none yet
        self.uncounted = False  # whether a score came without predictions
        self.waiting: list[int] = []  # positions in `parts` of scores that are still to be counted
        self.size = 0  # how many scores (samples times classes) these have

    def add(self, score: Score) -> None:
        """Add the score of one client."""
        self.parts.append(score)
        if isinstance(score.made, Predictions):
            self.waiting.append(len(self.parts) - 1)
            self.size += score.made.log_p.numel()
            if self.size > TOGETHER:
                self.flush()
        elif score.made is None:
            self.uncounted = self.uncounted or not score.predicted
        else:
            self._sum(score.made)
            said = score.made.confusion.sum(axis=0).tolist()
            self.parts[-1] = replace(score, made=None, predicted=tuple(said), auroc=score.made.auroc)

    def flush(self) -> None:
        """Count the predictions that wait."""
        if not self.waiting:
            return
        waiting = [self.parts[i] for i in self.waiting]
        made = Predictions.cat([s.made for s in waiting if isinstance(s.made, Predictions)])
        places = score_places(made)
        sizes, classes = [s.samples for s in waiting], len(waiting[0].total)
        part = np.repeat(np.arange(len(sizes)), sizes)
        said = np.bincount(part * classes + made.predicted.numpy(), minlength=len(sizes) * classes)
        rows = zip(self.waiting, waiting, said.reshape(-1, classes).tolist(), part_aurocs(places, sizes), strict=True)
        for i, score, predicted, auroc in rows:
            self.parts[i] = replace(score, made=None, predicted=tuple(predicted), auroc=auroc)
        self._sum(Counts.of(made, places))
        self.waiting, self.size = [], 0

    def _sum(self, counts: Counts) -> None:
        self.counts = counts if self.counts is None else Counts.sum([self.counts, counts], counts.classes)


@dataclass
class Group:
    """The scores of one group of clients. Where a client uses the server's model, it is counted once, in `both`."""

    both: Tally = field(default_factory=Tally)
    shared: Tally = field(default_factory=Tally)
    personal: Tally = field(default_factory=Tally)
    clients: list[tuple[int, bool, bool]] = field(default_factory=list)  # number, has a shared score, uses it
    fallback: int = 0

    def add(self, score: ClientScore) -> None:
        """Add one client. One without test samples is left out."""
        self.fallback += score.fallback
        if not score.personal.samples:
            return
        same = score.shared is score.personal
        self.clients.append((score.client, score.shared is not None, same))
        if same:
            self.both.add(score.personal)
            return
        if score.shared is not None:
            self.shared.add(score.shared)
        self.personal.add(score.personal)

    def scores(self) -> list[tuple[int, Score | None, Score]]:
        """(client, shared score, personal score) of each client, without predictions."""
        for tally in (self.both, self.shared, self.personal):
            tally.flush()
        both, shared, personal = iter(self.both.parts), iter(self.shared.parts), iter(self.personal.parts)
        rows: list[tuple[int, Score | None, Score]] = []
        for client, has_shared, same in self.clients:
            if same:
                one = next(both)
                rows.append((client, one, one))
            else:
                rows.append((client, next(shared) if has_shared else None, next(personal)))
        return rows

    def counts(self, own: Tally) -> Counts | None:
        """The summed counts of `both` and one other tally; None if some scores came without."""
        known = [tally.counts for tally in (self.both, own) if tally.counts is not None]
        if self.both.uncounted or own.uncounted or not known:
            return None
        return known[0] if len(known) == 1 else Counts.sum(known, known[0].classes)

    def population(self, sampled: bool) -> Population | None:
        """The metrics of this group; None if no client has test samples."""
        rows = self.scores()
        personal = over_clients([p for _, _, p in rows], self.counts(self.personal))
        if personal is None:
            return None
        shared = [s for _, s, _ in rows if s is not None]
        same = all(is_same for _, _, is_same in self.clients)
        return Population(
            global_=personal if same else over_clients(shared, self.counts(self.shared)),
            personal=personal,
            never_trained=self.fallback,
            sampled=sampled,
        )


class Summary:
    """One evaluation: add each client's scores, then read `metrics`, `rows` and `confusion`.

    `newcomers` are clients that never train; they form a group of their own.
    """

    def __init__(self, newcomers: frozenset[int] = frozenset()) -> None:
        self.newcomers = newcomers
        self.test: Score | None = None  # the server's model on its test set
        self.clients, self.new = Group(), Group()

    def add(self, score: ClientScore) -> None:
        """Add one client's scores."""
        (self.new if score.client in self.newcomers else self.clients).add(score)

    def add_test(self, score: Score) -> None:
        """Add the score of a chunk of the server's test set."""
        self.test = score if self.test is None else self.test + score

    def metrics(self, sampled: bool, groups: Mapping[str, Sequence[int]]) -> Metrics:
        """The metrics. `sampled` says that only some clients were evaluated; `groups` are from `thirds`."""
        return Metrics(
            global_=self.test.metrics(groups) if self.test is not None and self.test.samples else None,
            clients=self.clients.population(sampled),
            new=self.new.population(sampled),
            groups={word: list(classes) for word, classes in groups.items()},
        )

    def rows(self) -> dict[str, ClientRow]:
        """Each client's own figures, by client number as text; clients without test samples are left out."""
        found = sorted([*self.clients.scores(), *self.new.scores()], key=lambda row: row[0])
        return {
            str(client): ClientRow(
                samples=personal.samples,
                global_=None if shared is None else shared.metrics(),
                personal=personal.metrics(),
            )
            for client, shared, personal in found
        }

    def own_figures(self) -> dict[int, tuple[float, float]]:
        """(accuracy, loss) of each client's own model, by client number; clients without test samples are left out."""
        rows = [*self.clients.scores(), *self.new.scores()]
        return {client: (own.accuracy, own.loss / own.samples) for client, _, own in rows}

    def confusion(self) -> dict[str, list[list[int]]]:
        """Samples by true (row) and predicted class (column), of each model that was counted.

        Keys: global (on the test set), clients and personal (both on the clients' test parts, pooled), new and
        new_personal. Personal models that are the global model have no table of their own. With more than MOST_CLASSES
        classes there are none: nobody could read them, and a result would have gigabytes.
        """
        tables = {"global": None if self.test is None else self.test.counts}
        for group, name, own_name in ((self.clients, "clients", "personal"), (self.new, "new", "new_personal")):
            group.scores()
            if any(has_shared for _, has_shared, _ in group.clients):
                tables[name] = group.counts(group.shared)
            if not all(same for _, _, same in group.clients):
                tables[own_name] = group.counts(group.personal)
        known = {name: counts for name, counts in tables.items() if counts is not None}
        return {name: counts.confusion.tolist() for name, counts in known.items() if counts.classes <= MOST_CLASSES}


def over_clients(scores: Sequence[Score], counts: Counts | None = None) -> ClientMetrics | None:
    """Metrics over clients that have test samples, from their scores and the sum of their counts (None: not known).

    None if there is no such client.
    """
    scores = [s for s in scores if s.samples]
    if not scores:
        return None
    accuracy = _over([s.accuracy for s in scores])
    assert accuracy is not None
    pooled = Score(_sums([s.correct for s in scores]), _sums([s.total for s in scores]), sum(s.loss for s in scores))
    return ClientMetrics(
        mean=accuracy.mean,
        weighted=pooled.accuracy,
        std=accuracy.std,
        worst_decile=accuracy.worst_decile,
        loss=pooled.loss / pooled.samples,
        per_class=per_class(pooled),
        clients=len(scores),
        over=_spread(scores) if counts is not None else Spread(),
        **(detail(counts) if counts is not None else {}),
    )


def _sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(np.array(rows, np.int64).sum(axis=0).tolist())


def _spread(scores: Sequence[Score]) -> Spread:
    """The figures of `class_figures` and the areas over clients; computed for all clients at once."""
    correct, total, predicted = (
        np.array([getattr(s, name) for s in scores], np.float64) for name in ("correct", "total", "predicted")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, f1 = correct / total, 2 * correct / (total + predicted)
    return Spread(
        balanced_accuracy=_over(_mean_of_known(recall).tolist()),
        macro_f1=_over(_mean_of_known(f1).tolist()),
        auroc=_over([s.auroc for s in scores if s.auroc is not None]),
    )


def _mean_of_known(values: FloatArray) -> FloatArray:
    """The mean of each row's values that are not NaN."""
    known = ~np.isnan(values)
    means: FloatArray = np.where(known, values, 0.0).sum(axis=1) / known.sum(axis=1)
    return means


def _over(values: Sequence[float]) -> Over | None:
    """One figure's mean, standard deviation and worst tenth; None if there is no value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    worst = sorted(values)[: math.ceil(len(values) / 10)]
    return Over(
        mean=mean,
        std=math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)),
        worst_decile=sum(worst) / len(worst),
        clients=len(values),
    )


def summarise(
    test: Score | None,
    clients: Iterable[ClientScore],
    newcomers: frozenset[int],
    sampled: bool,
    groups: Mapping[str, Sequence[int]],
) -> Metrics:
    """One evaluation in one call, see `Summary`. `test` is the server's model on its test set."""
    summary = Summary(newcomers)
    summary.test = test
    for score in clients:
        summary.add(score)
    return summary.metrics(sampled, groups)
