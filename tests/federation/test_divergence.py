"""When a run counts as diverged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedskew.evaluation.metrics import Metrics, ModelMetrics, Population
from fedskew.federation.divergence import ABOVE, AT, PATIENCE, DivergenceCheck
from fedskew.federation.protocol import Record
from helpers.records import over_clients

NAN, INF = float("nan"), float("inf")


def record(round: int, accuracy: float | None, *, training: float = 1.0, loss: float = 1.0) -> Record:
    found = None
    if accuracy is not None:
        found = Metrics(global_=ModelMetrics(accuracy=accuracy, loss=loss, per_class=[accuracy] * 10))
    return Record(
        round=round,
        stage="train",
        cohort=[0],
        trained=[0],
        lost={},
        bytes_down={},
        bytes_up={},
        client_seconds=0,
        server_seconds=0,
        evaluate_seconds=0,
        seconds=0,
        training={"loss": training},
        metrics=found,
    )


def curve(*accuracies: float | None) -> list[Record]:
    return [record(i, a) for i, a in enumerate(accuracies)]


def divergence(records: Sequence[Record]) -> str:
    """What a new check says of the last record."""
    return DivergenceCheck().reason(records[:-1], records[-1])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_divergence(bad: float) -> None:
    assert divergence([record(4, 0.5, training=bad)]).endswith("in round 5: the training loss is not finite")
    assert divergence([record(4, 0.5, loss=bad)]).endswith("in round 5: the evaluation loss is not finite")
    assert divergence([record(4, None)]) == ""


def test_five_evaluations_at_chance_after_one_clearly_above_are_divergence() -> None:
    """Chance 10 %, clearly above from 28 %, at chance up to 11.8 %; rounds without evaluation do not count."""
    fallen = [0.3, 0.1, 0.1, None, 0.118, 0.05, 0.1]
    assert divergence(curve(*fallen)) == (
        "the run diverged in round 2: its accuracy is 10.00 %, which is chance, in 5 evaluations, "
        "after 30.00 % in round 1"
    )
    assert divergence(curve(*fallen[:-1])) == ""  # four are not enough


@pytest.mark.parametrize(
    "accuracies",
    [
        [0.1] * 20,  # has not begun to learn
        [0.27, *[0.1] * 10],  # was never clearly above
        [0.6, 0.1, 0.1, 0.1, 0.1, 0.2],  # recovers
        [0.6, 0.12, 0.12, 0.12, 0.12, 0.12],  # low, and better than chance
        [0.3, 0.1, 0.3, 0.1, 0.3, 0.1, 0.3, 0.1],  # swings, as on splits of two classes a client
    ],
)
def test_a_run_that_is_slow_low_or_unsteady_has_not_diverged(accuracies: list[float]) -> None:
    assert divergence(curve(*accuracies)) == ""


def from_the_whole_curve(records: Sequence[Record]) -> str:
    """The same decision in the plain way, from all records each time; losses are finite."""
    if records[-1].metrics is None:
        return ""
    points = [(r.round + 1, r.metrics.global_.accuracy) for r in records if r.metrics and r.metrics.global_]
    before, recent = points[:-PATIENCE], points[-PATIENCE:]
    best = max(before, key=lambda point: point[1], default=(0, 0.0))
    if best[1] < 0.1 + ABOVE * 0.9 or any(a > 0.1 + AT * 0.9 for _, a in recent):
        return ""
    return (
        f"the run diverged in round {recent[0][0]}: its accuracy is {100 * recent[-1][1]:.2f} %, which is chance, in "
        f"{PATIENCE} evaluations, after {100 * best[1]:.2f} % in round {best[0]}"
    )


LEVELS = st.sampled_from([None, 0.1, 0.1, 0.1, 0.1, 0.05, 0.118, 0.119, 0.28, 0.3, 0.6])


@given(st.lists(LEVELS, min_size=1, max_size=40), st.integers(0, 40))
@example([0.6, 0.3, 0.3, *[0.1] * 7], 4)
def test_a_check_that_goes_on_decides_in_each_round_as_from_the_whole_curve(
    accuracies: list[float | None], resumed: int
) -> None:
    """One check sees every round; another is new after `resumed` rounds, as in a run that is resumed."""
    records, whole, later = curve(*accuracies), DivergenceCheck(), DivergenceCheck()
    for n, last in enumerate(records):
        expected = from_the_whole_curve(records[: n + 1])
        assert whole.reason(records[:n], last) == expected
        if n >= resumed:
            assert later.reason(records[:n], last) == expected


def test_figures_that_arrive_a_round_late_count() -> None:
    """Without a test set on the server, a record has its accuracy only when the next one is there.

    Round 1 has 50 %, rounds 2 to 7 and 9 have 10 %, round 8 has nothing: the last five are those from round 4.
    """

    def site_figures(round: int, mean: float | None) -> Record:
        every = None if mean is None else over_clients(mean=mean, per_class=[mean] * 10)
        metrics = Metrics(
            clients=None if every is None else Population(global_=every, personal=every, never_trained=0, sampled=False)
        )
        return msgspec.structs.replace(record(round, None), metrics=metrics)

    check, records, said = DivergenceCheck(), list[Record](), []
    for round in range(8):
        last = site_figures(round, None)
        said.append(check.reason(records, last))
        if records:
            records[-1] = site_figures(round - 1, 0.5 if round == 1 else 0.1)
        records.append(last)
    assert said == [""] * 8  # the newest record has no classes yet
    whole = site_figures(8, 0.1)
    assert check.reason(records, whole).startswith("the run diverged in round 4: its accuracy is 10.00 %")


def test_a_round_costs_as_much_as_the_first_however_many_there_were() -> None:
    """Each record is read at most twice from those before: as the last of them, and when it joins the older ones."""
    reads: list[int] = []

    class Counted(list[Record]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            reads.extend(r.round for r in found)
            return found

    check, records = DivergenceCheck(), Counted()
    for last in curve(*[0.5] * 200):
        check.reason(records, last)
        records.append(last)
    assert max(Counter(reads).values()) <= 2


def test_a_record_whose_loss_is_not_finite_can_be_read_back() -> None:
    """JSON has no NaN: msgspec writes null, and a reader that expects a number would refuse the whole run."""
    written = msgspec.json.encode(record(0, 0.1, training=NAN, loss=INF).as_dict())
    again = msgspec.json.decode(written, type=Record)
    assert again.training == {"loss": None}
    assert divergence([again])
