"""The scores of one kind of model over many clients: a few numbers of each, and the sum of all counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedskew.evaluation.areas import part_aurocs
from fedskew.evaluation.bins import IntArray, Placed, Predictions, place
from fedskew.evaluation.counts import Counts, Sums
from fedskew.evaluation.few import count_few
from fedskew.evaluation.scores import Score, Together

TOGETHER = 200_000  # scores (samples times classes) that are counted in one go
FEW = 20_000  # scores that are counted in one go with those of other models, see `count_few`
COLUMNS = ("correct", "total", "losses", "predicted", "aurocs")


class Tally:
    """Scores of one kind of model, added one at a time or those of several clients at once.

    Its lists have one entry for each client, in the order they were added. With `each` False only the sum is wanted,
    as of the chunks of one test set: then `predicted` and `aurocs` are not known.
    """

    def __init__(self, *, each: bool = True) -> None:
        self.each = each
        self.correct: list[Sequence[int]] = []  # by class
        self.total: list[Sequence[int]] = []  # by class
        self.losses: list[float] = []  # sums over samples
        self.predicted: list[Sequence[int]] = []  # by class; (): not known
        self.aurocs: list[float | None] = []
        self.uncounted = False  # whether a score came without predictions
        self.sums: Sums | None = None  # while counts are added: their sum
        self.made: Counts | None = None  # otherwise: their sum, which takes less memory; None: there are none
        self.waiting: list[Predictions] = []  # that are still to be counted
        self.places: list[int] = []  # whose these are
        self.sizes: list[int] = []  # and how many samples each has
        self.size = 0  # how many scores (samples times classes) these have

    def add(self, score: Score) -> None:
        """Add the score of one client."""
        made = score.made
        waits = made if isinstance(made, Predictions) else None
        self._append([score.correct], [score.total], [score.loss], waits, [score.samples])
        if isinstance(made, Counts):
            self._sums(made.classes).add(made)
            if self.each:
                self.predicted[-1], self.aurocs[-1] = made.confusion.sum(axis=0).tolist(), made.auroc
        self.uncounted = self.uncounted or made is None

    def add_together(self, scored: Together) -> None:
        """Add the scores of several clients."""
        if scored.made is None:
            correct, total = (table.tolist() for table in scored.by_class())
        else:  # they are counted with the rest
            correct = total = [()] * len(scored.sizes)
        self._append(correct, total, scored.losses, scored.made, scored.sizes)
        self.uncounted = self.uncounted or scored.made is None

    def _append(
        self,
        correct: Sequence[Sequence[int]],
        total: Sequence[Sequence[int]],
        losses: Sequence[float],
        made: Predictions | None,
        sizes: Sequence[int],
    ) -> None:
        first, clients = len(self.losses), len(losses)
        self.correct += correct
        self.total += total
        self.losses += losses
        self.predicted += [()] * clients
        self.aurocs += [None] * clients
        if made is not None:
            self.waiting.append(made)
            self.places += range(first, first + clients)
            self.sizes += sizes
            self.size += made.log_p.numel()
            if self.size > TOGETHER:
                count_waiting([self])

    def _sums(self, classes: int) -> Sums:
        if self.sums is None:
            self.sums = Sums(classes)
            if self.made is not None:
                self.sums.add(self.made)
        self.made = None
        return self.sums

    def count(self, placed: Placed) -> None:
        """Count the predictions that wait, whose places are now known."""
        classes = placed.keys.shape[1]
        self._sums(classes).add_placed(placed)
        if self.each:
            shape = len(self.sizes), classes
            rows = np.repeat(np.arange(shape[0]) * classes, self.sizes)
            true = rows + placed.y
            places = true[placed.y == placed.predicted], true, rows + placed.predicted
            correct, total, said = (np.bincount(at, minlength=shape[0] * classes).reshape(shape) for at in places)
            self._fill(correct, total, said, part_aurocs(placed, total))
        self._clear()

    def take(self, counts: Counts) -> None:
        """Add the counts of the predictions that wait."""
        if self.sums is None and self.made is None:
            self.made = counts
        else:
            self._sums(counts.classes).add(counts)
        self._clear()

    def _fill(self, correct: IntArray, total: IntArray, said: IntArray, aurocs: Sequence[float | None]) -> None:
        """Note of each client that waits its tables by class, and its area under the ROC curve."""
        rows = zip(self.places, correct.tolist(), total.tolist(), said.tolist(), aurocs, strict=True)
        for i, *row in rows:
            self.correct[i], self.total[i], self.predicted[i], self.aurocs[i] = row

    def _clear(self) -> None:
        self.waiting, self.places, self.sizes, self.size = [], [], [], 0

    @property
    def counts(self) -> Counts | None:
        """The counts of all samples together; None if some are not known, or there are none. Nothing may wait."""
        if self.sums is not None:
            self.made, self.sums = self.sums.counts(), None
        return None if self.uncounted else self.made

    def tables(self) -> tuple[IntArray, IntArray]:
        """The correct samples and all samples of each client, by class.  # [clients, classes]"""
        return np.array(self.correct, np.int64), np.array(self.total, np.int64)

    def pooled(self, tables: tuple[IntArray, IntArray] | None = None) -> Score:
        """The score on the samples of all clients together. `tables` are its own, if they are known already."""
        correct, total = (tuple(table.sum(axis=0).tolist()) for table in tables or self.tables())
        return Score(correct, total, sum(self.losses), self.counts)

    def scores(self) -> list[Score]:
        """The score of each client, without predictions."""
        rows = zip(self.correct, self.total, self.losses, self.predicted, self.aurocs, strict=True)
        return [Score(tuple(c), tuple(t), loss, None, tuple(said), auroc) for c, t, loss, said, auroc in rows]


def count_waiting(tallies: Sequence[Tally]) -> None:
    """Count the predictions that wait in these, in one go."""
    filled = [tally for tally in tallies if tally.waiting]
    if not filled:
        return
    filled.sort(key=lambda tally: tally.each)
    made = [made for tally in filled for made in tally.waiting]
    models = [sum(tally.sizes) for tally in filled]
    if sum(tally.size for tally in filled) <= FEW:
        few = count_few(made, models, [size for tally in filled if tally.each for size in tally.sizes])
        start = 0
        for tally, counts in zip(filled, few.models, strict=True):
            if tally.each:
                mine = slice(start, start := start + len(tally.sizes))
                tally._fill(few.correct[mine], few.total[mine], few.predicted[mine], few.aurocs[mine])
            tally.take(counts)
        return
    placed, end = place(Predictions.cat(made)), 0
    for tally, size in zip(filled, models, strict=True):
        start, end = end, end + size
        tally.count(placed.rows(start, end))


def merged(first: Tally, second: Tally, from_first: Sequence[bool]) -> Tally:
    """Both tallies as one: `from_first` says of each client in order where its entry is. Nothing may wait in them."""
    if not (first.losses and second.losses):
        return first if first.losses else second
    both = Tally()
    for name in COLUMNS:
        one, two = iter(getattr(first, name)), iter(getattr(second, name))
        setattr(both, name, [next(one if is_first else two) for is_first in from_first])
    both.uncounted = first.uncounted or second.uncounted
    for tally in (first, second):
        if tally.counts is not None:
            both._sums(tally.counts.classes).add(tally.counts)
    return both
