"""When a run counts as diverged, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.evaluation.metrics import Metrics, ModelMetrics, Population
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run import Run, resume
from fedskew.experiment.run_directory import read_run
from fedskew.federation.divergence import ABOVE, AT, PATIENCE, DivergenceCheck
from fedskew.federation.protocol import Diverged, Record
from fedskew.methods import REGISTRY
from fedskew.studies.choice import choose_rate
from fedskew.studies.compare import Compared, summarise
from fedskew.studies.execution import execute
from helpers.records import over_clients

WILD = Training(lr=1e30, batch_size=32)  # the first step sends the weights beyond what float32 holds
SMALL = Experiment(split="iid:clients=3", model="mlp:hidden=8", rounds=8)
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


@dataclass(frozen=True)
class Collapse(Method):
    """FedAvg whose server forgets everything in round 2: all predictions are the first class from there on."""

    def aggregate(self, site: Any, server: Any, updates: Any) -> Any:
        made = super().aggregate(site, server, updates)
        if site.round < 2:
            return made
        zeros = {name: torch.zeros_like(t) for name, t in made["parameters"].items()}
        return made | {"parameters": type(made["parameters"])(zeros)}

    def client(self, site: Any, broadcast: Any, state: Any) -> Any:
        frozen = replace(site.training, epochs=0) if site.round >= 2 else site.training
        return super().client(replace(site, training=frozen), broadcast, state)


def test_a_run_that_falls_to_chance_stops_keeps_its_records_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two good rounds, then five at chance: it ends after seven of eight."""
    monkeypatch.setitem(REGISTRY, "collapse", Collapse)
    run = Run(replace(SMALL, method=Collapse()), out=tmp_path / "a")
    records = list(run)
    assert [r.round for r in records] == list(range(7))
    assert run.result is not None
    assert run.result.rounds == 7
    assert run.result.diverged == records[-1].diverged == run.diverged
    assert run.diverged.startswith("the run diverged in round 3: its accuracy is")
    saved = read_run(tmp_path / "a")
    assert saved.result == run.result
    assert saved.records[-1].diverged == run.diverged
    assert [r.diverged for r in saved.records[:-1]] == [""] * 6


def test_with_warn_it_goes_on_and_says_so_once() -> None:
    run = Run(replace(SMALL, method=Collapse(), on_divergence="warn", rounds=9))
    records = list(run)
    assert len(records) == 9
    assert [bool(r.diverged) for r in records] == [False] * 6 + [True] + [False] * 2
    assert run.result is not None
    assert run.result.diverged


def test_a_stopped_run_is_not_continued_by_resuming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "collapse", Collapse)
    first = Run(replace(SMALL, rounds=20, method=Collapse()), out=tmp_path / "a")
    list(first)
    assert first.result is not None
    assert first.result.rounds == 7
    again = resume(tmp_path / "a")
    assert list(again) == []
    assert again.result == first.result
    assert again.diverged == first.diverged


def test_updates_that_are_not_finite_from_all_clients_end_the_run_as_diverged(tmp_path: Path) -> None:
    """The first round without a finite update has no record; the server's model is the one before."""

    @dataclass(frozen=True)
    class Burst(Method):
        def client(self, site: Any, broadcast: Any, state: Any) -> Any:
            update, state = super().client(site, broadcast, state)
            if site.round == 2:
                for t in update.payload["parameters"].values():
                    t.fill_(float("nan"))
            return update, state

    run = Run(replace(SMALL, method=Burst()), out=tmp_path / "a")
    assert len(list(run)) == 2
    assert run.result is not None
    assert run.result.diverged == (
        "the run diverged in round 3: all 3 clients of the round sent values that are not finite"
    )
    assert (tmp_path / "a" / "model.safetensors").exists()


def test_a_run_that_diverges_in_its_first_round_has_no_result() -> None:
    with pytest.raises(Diverged, match="all 3 clients of the round sent values that are not finite"):
        list(Run(replace(SMALL, training=WILD)))


def test_a_study_counts_a_diverged_run_as_failed_and_says_so(tmp_path: Path) -> None:
    experiment = replace(SMALL, method=Collapse())
    for outcome in (execute(experiment, None), execute(replace(SMALL, training=WILD), None)):
        assert "diverged" in outcome.failed or "not finite" in outcome.failed
        line = summarise([Compared("x", 0, outcome)], None)[0]
        assert (line.seeds, line.failed, line.figures["global"].mean) == (0, 1, None)
    assert execute(replace(experiment, on_divergence="warn"), None).failed == ""


def test_a_diverged_run_read_from_its_directory_still_counts_as_failed(tmp_path: Path) -> None:
    experiment = replace(SMALL, training=Training(lr=1e18))
    first = execute(experiment, tmp_path / "a")
    assert first.failed
    assert execute(experiment, tmp_path / "a").failed == first.failed


def test_no_learning_rate_is_chosen_that_diverges(tmp_path: Path) -> None:
    assert choose_rate(replace(SMALL, rounds=2), [1e18, 0.1], tmp_path) == 0.1
    with pytest.raises(UsageError, match="diverged with each of the learning rates"):
        choose_rate(replace(SMALL, rounds=2), [1e18, 1e20], tmp_path / "b")


def test_the_setting_has_a_toml_form_and_its_default_is_left_out() -> None:
    assert "on_divergence" not in SMALL.to_toml()
    warn = replace(SMALL, on_divergence="warn")
    assert from_dict(warn.as_dict()) == warn
    with pytest.raises(UsageError, match="on_divergence"):
        from_dict({"on_divergence": "ignore"})
