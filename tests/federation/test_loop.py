"""The round loop: cohorts, the border where replies are checked, the ledger."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedskew.core.method import Method, Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.intake import fault_of
from fedskew.federation.loop import run
from fedskew.federation.protocol import QuorumLost, Reply
from fedskew.federation.wire import layout_of
from fedskew.methods.fedavg import FedAvg
from toys import digits, rounds, same, toy_q


def test_a_cohort_is_drawn_by_seed_and_round_alone() -> None:
    people = range(100)
    assert draw_cohort(people, 10, 1, 3) == draw_cohort(people, 10, 1, 3)
    assert draw_cohort(people, 10, 1, 3) != draw_cohort(people, 10, 1, 4)
    assert draw_cohort(people, 10, 2, 3) != draw_cohort(people, 10, 1, 3)
    assert draw_cohort(people, 100, 0, 0) == list(people)
    assert draw_cohort(people, 10, 1, 3) == sorted(draw_cohort(people, 10, 1, 3))
    seen = {c for r in range(100) for c in draw_cohort(people, 10, 0, r)}
    assert len(seen) == 100


def update(**tensors: torch.Tensor) -> Update:
    return Update({"parameters": Tensors(tensors)}, 1.0)


LAYOUT = layout_of(update(w=torch.zeros(2), b=torch.zeros(1)).payload)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (update(w=torch.zeros(2), b=torch.zeros(1)), ""),
        (update(w=torch.zeros(2)), "sent no parameters/b"),
        (update(w=torch.zeros(2), b=torch.zeros(1), c=torch.zeros(1)), "sent parameters/c, which is not part"),
        (update(w=torch.zeros(3), b=torch.zeros(1)), "sent parameters/w as F32[3], expected F32[2]"),
        (update(w=torch.zeros(2).double(), b=torch.zeros(1)), "sent parameters/w as F64[2], expected F32[2]"),
        (update(w=torch.tensor([0, torch.nan]), b=torch.zeros(1)), "not finite in parameters/w"),
        (update(w=torch.tensor([torch.inf, -torch.inf]), b=torch.zeros(1)), "not finite in parameters/w"),
        (update(w=torch.tensor([3e38, 3e38]), b=torch.zeros(1)), ""),
        (replace(update(w=torch.zeros(2), b=torch.zeros(1)), weight=float("nan")), "the weight nan"),
        (replace(update(w=torch.zeros(2), b=torch.zeros(1)), weight=-1.0), "the weight -1.0"),
        (replace(update(w=torch.zeros(2), b=torch.zeros(1)), weight=0.0), "the weight 0.0"),
        (replace(update(w=torch.zeros(2), b=torch.zeros(1)), weight=float("inf")), "the weight inf"),
    ],
)
def test_an_update_is_checked_at_the_border(sent: Update, words: str) -> None:
    why = fault_of(sent, LAYOUT)
    assert words in why
    assert bool(why) == bool(words)


class Answers:
    """A federation that replies as the test says, and remembers what was committed."""

    population = 3

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies, self.committed = replies, []

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Payload) -> Iterator[Reply]:
        yield from self.replies

    def commit(self, round: int, accepted: Sequence[int]) -> None:
        self.committed.append(list(accepted))

    def evaluate(self, round: int, broadcast: Payload) -> Metrics:
        return Metrics()

    def confusion(self) -> dict[str, list[list[int]]]:
        return {}

    def per_client(self) -> dict[str, ClientRow]:
        return {}

    def late_metrics(self) -> Metrics | None:
        return None


def answer(client: int, w: float, weight: float = 1.0) -> Reply:
    payload = {"parameters": Tensors(w=torch.tensor(w, dtype=torch.float64)), "buffers": Tensors()}
    return Reply(client, Update(payload, weight, {"loss": w}), seconds=1.0)


def go(replies: Sequence[Reply], quorum: int = 1, method: Method | None = None) -> tuple[Any, Answers]:
    world = toy_q(method or FedAvg())
    federation = Answers(replies)
    loop = run(world.method, federation, world.server_site, 1, lambda round: [0, 1, 2], quorum=quorum)
    return next(loop), federation


def test_the_round_goes_on_with_the_rest_and_says_who_and_why() -> None:
    """w = (1 * 1 + 3 * 5) / 4 = 4 from clients 0 and 2; client 1 sent NaN."""
    record, federation = go([answer(0, 1.0), answer(1, float("nan")), answer(2, 5.0, 3.0)])
    assert float(record.server["parameters"]["w"]) == 4.0
    assert record.trained == [0, 2]
    assert list(record.lost) == [1]
    assert "not finite" in record.lost[1]
    assert federation.committed == [[0, 2]]
    assert record.training == {"loss": 4.0}
    assert record.client_seconds == 3.0


def test_without_a_quorum_the_round_does_not_count() -> None:
    world = toy_q(FedAvg())
    federation = Answers([answer(0, 1.0), Reply(1, None, "dropped out"), Reply(2, None, "dropped out")])
    with pytest.raises(QuorumLost, match="1 of 3 clients gave a usable update, 2 are needed"):
        next(run(world.method, federation, world.server_site, 1, lambda round: [0, 1, 2], quorum=2))
    assert federation.committed == []


def test_a_round_without_any_update_is_a_lost_quorum_not_a_crash() -> None:
    with pytest.raises(QuorumLost, match="client 0 dropped out"):
        go([Reply(c, None, "dropped out") for c in range(3)])


@dataclass(frozen=True)
class Impatient(Method):
    """Reads one update and stops."""

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        return server | next(iter(updates)).payload


def test_updates_a_method_does_not_read_are_still_checked_and_counted() -> None:
    record, federation = go([answer(0, 1.0), answer(1, 2.0), answer(2, 3.0)], method=Impatient())
    assert record.trained == [0, 1, 2]
    assert federation.committed == [[0, 1, 2]]


def test_the_ledger_counts_what_went_down_and_came_up() -> None:
    """One double each way for two clients."""
    records, _ = rounds(toy_q(FedAvg()), 1)
    assert records[0].bytes_down == {"parameters": 16, "buffers": 0}
    assert records[0].bytes_up == {"parameters": 16, "buffers": 0}


def test_a_client_that_is_lost_was_sent_the_model_all_the_same() -> None:
    """One double down to each of three clients, and up from the two whose updates count."""
    record, _ = go([answer(0, 1.0), Reply(1, None, "dropped out"), answer(2, 5.0)])
    assert record.bytes_down == {"parameters": 24, "buffers": 0}
    assert record.bytes_up == {"parameters": 16, "buffers": 0}


def test_updates_a_method_does_not_read_count_for_the_quorum() -> None:
    replies = [answer(0, 1.0), Reply(1, None, "dropped out"), answer(2, 3.0)]
    assert go(replies, quorum=2, method=Impatient())[0].trained == [0, 2]
    with pytest.raises(QuorumLost, match="2 of 3 clients gave a usable update, 3 are needed"):
        go(replies, quorum=3, method=Impatient())


def test_a_client_without_data_is_skipped_with_a_note() -> None:
    world = toy_q(FedAvg())
    empty = torch.tensor([0, 0, 3])
    world.train = world.train._replace(values=torch.tensor([1, 2, 3]), offsets=empty)
    records, _ = rounds(world, 1)
    assert records[0].lost == {0: "has no training data"}
    assert records[0].trained == [1]


def test_a_resumed_run_is_the_run_that_never_stopped() -> None:
    world = digits(FedAvg(), training=Training(lr=0.1, batch_size=16, schedule="cosine"), count=4)
    whole, _ = rounds(world, 4)
    federation = rounds(world, 2)[1]
    rest = run(world.method, federation, world.server_site, 4, lambda r: list(range(5)), start=(2, whole[1].server))
    assert same(list(rest)[-1].server, whole[-1].server)


def test_a_record_is_plain_values() -> None:
    import json

    records, _ = rounds(toy_q(FedAvg()), 1)
    assert json.loads(json.dumps(records[0].as_dict()))["trained"] == [0, 1]


@dataclass(frozen=True)
class Declares(Method):
    """A method that says what its clients send, and whose clients cannot train on made-up samples."""

    wrong: bool = False

    def layout(self, site: Site, broadcast: Payload) -> Payload | None:
        return {"parameters": Tensors(), "buffers": Tensors()} if self.wrong else broadcast

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        assert len(site.data) != site.classes, "asked to train on made-up samples"
        return super().client(site, broadcast, state)


def test_a_layout_that_a_method_declares_is_what_updates_are_checked_against() -> None:
    records, _ = rounds(digits(Declares()), 1)
    assert records[0].lost == {}
    with pytest.raises(QuorumLost, match="not part of the update"):
        rounds(digits(Declares(wrong=True)), 1)
