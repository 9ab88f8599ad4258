"""A federation of sites on a network: what `Simulation` is on one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from fedskew.core.tensors import Payload
from fedskew.deploy.messages import Answer, Ask, scored, update_of
from fedskew.deploy.roster import Roster
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.evaluation.scores import ClientScore, Score, per_client, summarise, thirds
from fedskew.federation.protocol import Reply
from fedskew.federation.wire import encode
from fedskew.federation.world import World


@dataclass
class Deployment:
    """One message per site and round: judge the model of the round before, then train on it.

    So the clients' figures of a round are known in the next one (`before`), those of the last round by a
    closing wave. A site's new state stays on its disk; the next message says whether it counts (`base`).
    """

    world: World
    sites: Roster
    ask: Ask  # what all messages of the run have in common
    timeout: float
    evaluated: Sequence[int]  # clients whose own test part is evaluated
    newcomers: frozenset[int] = frozenset()
    base: dict[int, int] = field(default_factory=dict)  # client -> the last round its work counted in
    pending: int = -1  # the round whose clients' figures are still to come
    keep: int = -1  # the earliest round the server may be taken up from
    scores: list[ClientScore] = field(default_factory=list)
    before: Metrics | None = None  # the clients' figures of the round before, which arrive with this one's replies

    def __post_init__(self) -> None:
        self.population = self.world.population
        counts = self.world.y[self.world.train.values].bincount(minlength=self.world.classes)
        self.groups = thirds(counts.tolist())  # none where sites bring their data: the server has no counts

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        evaluated = set(self.evaluated) if self.pending >= 0 else set()
        everyone = [c for c in range(self.population) if c in cohort or c in evaluated]
        asks = {c: self._ask(c, round, stage, train=c in cohort, judge=c in evaluated) for c in everyone}
        order = [*cohort, *(c for c in everyone if c not in cohort)]
        self.scores, self.before = [], None
        for heard in self.sites.wave(asks, encode(broadcast), self.timeout, order):
            if heard.answer is not None:
                self._keep(heard.client, heard.answer)
            if heard.client in cohort:
                yield self._reply(heard.client, heard.answer, heard.payload, heard.why)
        if self.pending >= 0:
            self.before = self._figures(None)

    @staticmethod
    def _reply(client: int, answer: Answer | None, payload: Payload, why: str) -> Reply:
        if answer is None or why:
            return Reply(client, None, why)
        return Reply(client, update_of(answer, payload), seconds=max(0.0, answer.seconds))

    def _ask(self, client: int, round: int, stage: str, *, train: bool, judge: bool) -> Ask:
        return msgspec.structs.replace(
            self.ask,
            client=client,
            round=round,
            stage=stage,
            train=train,
            base=self.base.get(client, -1),
            keep=self.keep,
            judge=self.pending if judge else -1,
        )

    def _keep(self, client: int, answer: Answer) -> None:
        score = scored(answer, client, self.world.classes, client in self.base)
        if score is not None:
            self.scores.append(score)

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        self.base |= dict.fromkeys(accepted, round)
        self.pending = -1

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        pieces = range(self.world.chunks() if self.world.method.has_global else 0)
        test: Score | None = None
        for piece in pieces:
            score = self.world.evaluate_global(piece, round, broadcast)
            test = score if test is None else test + score
        self.pending = round
        if round == self.world.rounds - 1:
            self._close(round, broadcast)
        else:
            self.scores = []
        return self._figures(test)

    def _close(self, round: int, broadcast: Payload) -> None:
        """The last round has no next: its figures are asked for."""
        asks = {c: self._ask(c, round, "evaluate", train=False, judge=True) for c in self.evaluated}
        self.scores = []
        for heard in self.sites.wave(asks, encode(broadcast), self.timeout, sorted(asks)):
            if heard.answer is not None:
                self._keep(heard.client, heard.answer)

    def _figures(self, test: Score | None) -> Metrics:
        scores = sorted(self.scores, key=lambda score: score.client)
        sampled = len(self.evaluated) < self.population
        return summarise(test, scores, self.newcomers, sampled, self.groups)

    def late_metrics(self) -> Metrics | None:
        return self.before

    def per_client(self) -> dict[str, ClientRow]:
        """Each client's own figures in the last evaluation."""
        return per_client(sorted(self.scores, key=lambda score: score.client))
