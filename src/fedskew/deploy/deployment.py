"""A federation of sites on a network, with the interface of `Simulation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from fedskew.core.tensors import Payload
from fedskew.deploy.messages import Request, client_score, update_of
from fedskew.deploy.roster import Replies, Roster, SiteReply
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.evaluation.scores import ClientScore, Score, thirds
from fedskew.evaluation.sent_counts import most_numbers
from fedskew.evaluation.summary import Summary
from fedskew.federation.intake import expected_layout, fault_of
from fedskew.federation.norms import norms_of, outliers
from fedskew.federation.protocol import Reply
from fedskew.federation.wire import Layout, encode, size_of_layout
from fedskew.federation.world import World

SLACK = 256 << 10  # bytes of a reply beside its tensors and counts: scores by class, metrics


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
    norm_bound: float = 0.0  # an update of more than this times the usual norm is refused; 0: none is
    samples: Callable[[int], int | None] = lambda client: None  # training samples of a client; None: not known
    evaluated: Sequence[int]  # clients that are evaluated on their own test samples
    newcomers: frozenset[int] = frozenset()  # clients that never train
    base: dict[int, int] = field(default_factory=dict)  # client -> the last round in which its update was accepted
    pending: int = -1  # the round whose client metrics are still to come; -1: none
    keep: int = -1  # the earliest round that the server may be resumed from
    scores: list[ClientScore] = field(default_factory=list)  # of the last evaluation
    late: Metrics | None = None  # the clients' metrics of the previous round
    known: list[tuple[int, dict[int, tuple[float, float]]]] = field(default_factory=list)  # see `own_figures`
    layouts: dict[str, Layout] = field(default_factory=dict)  # of updates, by stage
    shortened: set[int] = field(default_factory=set)  # clients that shortened an update to a bound of their own
    summary: Summary = field(default_factory=Summary)  # of the last evaluation

    def __post_init__(self) -> None:
        self.population = self.world.population
        self.slack = SLACK + 2 * most_numbers(self.world.classes) * 8 * 4 // 3  # counts are base64 text
        counts = self.world.y[self.world.train.values].bincount(minlength=self.world.classes)
        self.groups = thirds(counts.tolist())  # empty if sites bring their own data: the server has no counts

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        evaluated = set(self.evaluated) if self.pending >= 0 else set()
        clients = [c for c in range(self.population) if c in cohort or c in evaluated]
        requests = {c: self._request(c, round, stage, train=c in cohort, evaluate=c in evaluated) for c in clients}
        layout = self._layout(round, stage, broadcast)
        self.scores, self.late, self.known = [], None, []
        with self.roster.collect(
            requests, encode(broadcast), self.timeout, size_of_layout(layout) + SLACK + 300 * len(layout)
        ) as replies:
            refused = self._outliers(replies, cohort, layout, broadcast)
            for client in [*cohort, *(c for c in clients if c not in cohort)]:
                reply = replies.read(client, len(layout) + 1, self.samples(client))
                replies.drop(client)
                self._add_score(reply)
                if client in refused:
                    yield Reply(client, None, refused[client])
                elif client in cohort:
                    yield self._as_reply(reply)
        if self.pending >= 0:
            self.late = self._metrics([])
            self.known.append((self.pending, self.summary.own_figures()))

    def _layout(self, round: int, stage: str, broadcast: Payload) -> Layout:
        """The layout of an update in this stage, which bounds what sites may send."""
        if stage not in self.layouts:
            site = self.world.server_site(round, stage)
            self.layouts[stage] = expected_layout(self.world.method, site, broadcast)
        return self.layouts[stage]

    def _outliers(self, replies: Replies, cohort: Sequence[int], layout: Layout, broadcast: Payload) -> dict[int, str]:
        """Client -> why its update is refused beside the others of this round. Reads one reply at a time."""
        norms = {}
        for client in cohort if self.norm_bound else ():
            reply = replies.read(client, len(layout) + 1, self.samples(client))
            if (
                reply.answer is not None
                and not reply.why
                and not fault_of(update_of(reply.answer, reply.payload), layout)
            ):
                norms[client] = norms_of(reply.payload)
        return outliers(norms, norms_of(broadcast), self.norm_bound)

    def _as_reply(self, reply: SiteReply) -> Reply:
        if reply.answer is None or reply.why:
            return Reply(reply.client, None, reply.why)
        if reply.answer.clipped and reply.client not in self.shortened:
            self.shortened.add(reply.client)
            name = self.roster.names[reply.client]
            self.roster.say(f"note: site {name} shortens its updates to a bound of its own: results depend on it")
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
        test = [self.world.evaluate_global(chunk, round, broadcast) for chunk in chunks]
        self.pending = round
        self.scores = []
        if round == self.world.rounds - 1:
            self._evaluate_clients(round, broadcast)
        metrics = self._metrics(test)
        self.known.append((round, self.summary.own_figures()))
        return metrics

    def _evaluate_clients(self, round: int, broadcast: Payload) -> None:
        """Request the client metrics of the last round, which no further round would bring."""
        requests = {c: self._request(c, round, "evaluate", train=False, evaluate=True) for c in self.evaluated}
        with self.roster.collect(requests, encode(broadcast), self.timeout, self.slack) as replies:
            for client in sorted(requests):
                self._add_score(replies.read(client, 0))

    def _metrics(self, test: Sequence[Score]) -> Metrics:
        self.summary = Summary(self.newcomers)
        for chunk in test:
            self.summary.add_test(chunk)
        for score in sorted(self.scores, key=lambda score: score.client):
            self.summary.add(score)
        return self.summary.metrics(len(self.evaluated) < self.population, self.groups)

    def late_metrics(self) -> Metrics | None:
        return self.late

    def own_figures(self) -> list[tuple[int, dict[int, tuple[float, float]]]]:
        return self.known

    def per_client(self) -> dict[str, ClientRow]:
        return self.summary.rows()

    def confusion(self) -> dict[str, list[list[int]]]:
        return self.summary.confusion()
