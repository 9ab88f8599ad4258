"""Scores of many clients, added one after another, and the metrics of one evaluation made from them.

Predictions are counted together with those of other clients and models, which is faster for small clients; afterwards
only a few numbers of each client are kept, so memory does not grow with clients times classes squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedskew.evaluation.counts import set_areas
from fedskew.evaluation.metrics import ClientRow, Metrics, Population
from fedskew.evaluation.over_clients import over_clients
from fedskew.evaluation.scores import ClientScore, Score, Together
from fedskew.evaluation.tally import Tally, count_waiting, merged

MOST_CLASSES = 300  # of a confusion table that is kept


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

    def add_together(self, clients: Sequence[int], scored: Together, fallback: int) -> None:
        """Add several clients that use the server's model and have test samples; `fallback` of them never trained."""
        self.fallback += fallback
        self.clients += [(client, True, True) for client in clients]
        self.both.add_together(scored)

    @property
    def tallies(self) -> list[Tally]:
        """All of them."""
        return [self.both, self.shared, self.personal]

    def models(self) -> tuple[Tally, Tally]:
        """The server's model and the clients' own, each over the clients that have one, in their order."""
        count_waiting(self.tallies)
        if all(same for _, _, same in self.clients):
            return self.both, self.both
        shared = merged(self.both, self.shared, [same for _, has_shared, same in self.clients if has_shared])
        return shared, merged(self.both, self.personal, [same for _, _, same in self.clients])

    def scores(self) -> list[tuple[int, Score | None, Score]]:
        """(client, shared score, personal score) of each client, without predictions."""
        shared, personal = (iter(tally.scores()) for tally in self.models())
        return [(client, next(shared) if has else None, next(personal)) for client, has, _ in self.clients]

    def population(self, models: tuple[Tally, Tally], sampled: bool) -> Population | None:
        """The metrics of this group and its `models`; None if no client has test samples."""
        shared, personal = models
        of_personal = over_clients(personal)
        if of_personal is None:
            return None
        return Population(
            global_=of_personal if shared is personal else over_clients(shared),
            personal=of_personal,
            never_trained=self.fallback,
            sampled=sampled,
        )


class Summary:
    """One evaluation: add each client's scores, then read `metrics`, `rows` and `confusion`.

    `newcomers` are clients that never train; they form a group of their own.
    """

    def __init__(self, newcomers: frozenset[int] = frozenset()) -> None:
        self.newcomers = newcomers
        self.test = Tally(each=False)  # the server's model on its test set
        self.clients, self.new = Group(), Group()

    def add(self, score: ClientScore) -> None:
        """Add one client's scores."""
        (self.new if score.client in self.newcomers else self.clients).add(score)

    def add_together(self, clients: Sequence[int], scored: Together, untrained: Sequence[int]) -> None:
        """Add clients that use the server's model, evaluated together; `untrained` are those that never trained."""
        if not self.newcomers.intersection(clients):
            self.clients.add_together(clients, scored, len(untrained))
            return
        for client, score in zip(clients, scored.scores(), strict=True):
            self.add(ClientScore(client, score, score, fallback=client in untrained))

    def add_test(self, score: Score) -> None:
        """Add the score of a chunk of the server's test set."""
        self.test.add(score)

    def metrics(self, sampled: bool, groups: Mapping[str, Sequence[int]]) -> Metrics:
        """The metrics. `sampled` says that only some clients were evaluated; `groups` are from `thirds`."""
        count_waiting([self.test, *self.clients.tallies, *self.new.tallies])
        models, new_models = self.clients.models(), self.new.models()
        tallies = dict.fromkeys([self.test, *models, *new_models])  # each once
        set_areas([tally.counts for tally in tallies if tally.counts is not None])
        return Metrics(
            global_=self.test.pooled().metrics(groups) if self.test.losses else None,
            clients=self.clients.population(models, sampled),
            new=self.new.population(new_models, sampled),
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
        count_waiting([self.test])
        tallies = {"global": self.test}
        for group, name, own_name in ((self.clients, "clients", "personal"), (self.new, "new", "new_personal")):
            shared, personal = group.models()
            if any(has_shared for _, has_shared, _ in group.clients):
                tallies[name] = shared
            if shared is not personal:
                tallies[own_name] = personal
        known = {name: counts for name, tally in tallies.items() if (counts := tally.counts) is not None}
        return {name: counts.confusion.tolist() for name, counts in known.items() if counts.classes <= MOST_CLASSES}


def summarise(
    test: Score | None,
    clients: Iterable[ClientScore],
    newcomers: frozenset[int],
    sampled: bool,
    groups: Mapping[str, Sequence[int]],
) -> Metrics:
    """One evaluation in one call, see `Summary`. `test` is the server's model on its test set."""
    summary = Summary(newcomers)
    if test is not None:
        summary.add_test(test)
    for score in clients:
        summary.add(score)
    return summary.metrics(sampled, groups)
