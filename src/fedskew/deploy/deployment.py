"""A federation of sites on a network, with the interface of `Simulation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from fedskew.core.tensors import Payload
from fedskew.deploy.messages import Request, client_score, update_of
from fedskew.deploy.roster import Roster, SiteReply
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.evaluation.scores import ClientScore, Score, thirds
from fedskew.evaluation.summary import Summary
from fedskew.federation.protocol import Reply
from fedskew.federation.wire import encode
from fedskew.federation.world import World


@dataclass(kw_only=True)
class Deployment:
    """Sends each site one request per round: evaluate the model of the previous round, then train on it.

    So the clients' metrics of a round arrive with the replies of the next one (`late_metrics`). After the last round
    the sites are asked for them once more. The new state of a client stays on the disk of its site; the field `base`
    of the next request says whether it counts.
    """

    world: World
    roster: Roster
    request: Request  # the fields that all requests of the run have in common
    timeout: float  # seconds to wait for the replies of a round
    evaluated: Sequence[int]  # clients that are evaluated on their own test samples
    newcomers: frozenset[int] = frozenset()  # clients that never train
    base: dict[int, int] = field(default_factory=dict)  # client -> the last round in which its update was accepted
    pending: int = -1  # the round whose client metrics are still to come; -1: none
    keep: int = -1  # the earliest round that the server may be resumed from
    scores: list[ClientScore] = field(default_factory=list)  # of the last evaluation
    late: Metrics | None = None  # the clients' metrics of the previous round
    summary: Summary = field(default_factory=Summary)  # of the last evaluation

    def __post_init__(self) -> None:
        self.population = self.world.population
        counts = self.world.y[self.world.train.values].bincount(minlength=self.world.classes)
        self.groups = thirds(counts.tolist())  # empty if sites bring their own data: the server has no counts

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        evaluated = set(self.evaluated) if self.pending >= 0 else set()
        clients = [c for c in range(self.population) if c in cohort or c in evaluated]
        requests = {c: self._request(c, round, stage, train=c in cohort, evaluate=c in evaluated) for c in clients}
        order = [*cohort, *(c for c in clients if c not in cohort)]
        self.scores, self.late = [], None
        for reply in self.roster.exchange(requests, encode(broadcast), self.timeout, order):
            self._add_score(reply)
            if reply.client in cohort:
                yield self._as_reply(reply)
        if self.pending >= 0:
            self.late = self._metrics(None)

    @staticmethod
    def _as_reply(reply: SiteReply) -> Reply:
        if reply.answer is None or reply.why:
            return Reply(reply.client, None, reply.why)
        update = update_of(reply.answer, reply.payload)
        return Reply(reply.client, update, seconds=max(0.0, reply.answer.seconds))

    def _request(self, client: int, round: int, stage: str, *, train: bool, evaluate: bool) -> Request:
        return msgspec.structs.replace(
            self.request,
            client=client,
            round=round,
            stage=stage,
            train=train,
            base=self.base.get(client, -1),
            keep=self.keep,
            evaluate_round=self.pending if evaluate else -1,
            counts=True,
        )

    def _add_score(self, reply: SiteReply) -> None:
        if reply.answer is None:
            return
        score = client_score(reply.answer, reply.client, self.world.classes, reply.client in self.base)
        if score is not None:
            self.scores.append(score)

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        self.base |= dict.fromkeys(accepted, round)
        self.pending = -1

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        chunks = range(self.world.chunks() if self.world.method.has_global else 0)
        test: Score | None = None
        for chunk in chunks:
            score = self.world.evaluate_global(chunk, round, broadcast)
            test = score if test is None else test + score
        self.pending = round
        self.scores = []
        if round == self.world.rounds - 1:
            self._evaluate_clients(round, broadcast)
        return self._metrics(test)

    def _evaluate_clients(self, round: int, broadcast: Payload) -> None:
        """Request the client metrics of the last round, which no further round would bring."""
        requests = {c: self._request(c, round, "evaluate", train=False, evaluate=True) for c in self.evaluated}
        for reply in self.roster.exchange(requests, encode(broadcast), self.timeout, sorted(requests)):
            self._add_score(reply)

    def _metrics(self, test: Score | None) -> Metrics:
        self.summary = Summary(self.newcomers)
        self.summary.test = test
        for score in sorted(self.scores, key=lambda score: score.client):
            self.summary.add(score)
        return self.summary.metrics(len(self.evaluated) < self.population, self.groups)

    def late_metrics(self) -> Metrics | None:
        return self.late

    def per_client(self) -> dict[str, ClientRow]:
        return self.summary.rows()

    def confusion(self) -> dict[str, list[list[int]]]:
        return self.summary.confusion()
