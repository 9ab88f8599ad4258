"""Early stopping looks at validation data only, decides from the records, and ends a run in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.experiment.config import Evaluation, Experiment, Holdout, Stop, from_dict
from fedskew.experiment.run import Run, resume
from fedskew.experiment.run_directory import read_run
from fedskew.experiment.stopping import why_stop
from fedskew.methods.ccvr import CCVR
from helpers.records import a_record

# a learning rate of almost 0: nothing improves after the first evaluation
STILL = Experiment(
    split="iid:clients=3",
    model="mlp:hidden=4",
    rounds=9,
    training=Training(lr=1e-12, batch_size=64),
    holdout=Holdout(validation=0.2),
    stop=Stop(patience=2),
)


def records(*values: float | None) -> list[Any]:
    return [a_record(round, validation=value) for round, value in enumerate(values)]


@pytest.mark.parametrize(
    ("stop", "values", "stops"),
    [
        (Stop(), (0.5, 0.4, 0.3, 0.2), False),
        (Stop(patience=2), (0.5, 0.4), False),
        (Stop(patience=2), (0.5, 0.4, 0.5), True),
        (Stop(patience=2), (0.5, None, 0.4, None, 0.6), False),
        (Stop(patience=2), (0.5, float("nan"), float("nan")), True),
        (Stop(patience=2, min_delta=5), (0.5, 0.54, 0.56), False),
        (Stop(patience=2, min_delta=5), (0.5, 0.54, 0.549), True),
        (Stop(patience=2, figure="loss"), (0.5, 0.4, 0.3), False),
        (Stop(patience=2, figure="loss"), (0.5, 0.6, 0.7), True),
        (Stop(patience=1), (), False),
    ],
)
def test_a_run_ends_after_so_many_evaluations_without_a_better_value(
    stop: Stop, values: tuple[float | None, ...], stops: bool
) -> None:
    assert bool(why_stop(records(*values), stop)) is stops


def test_the_reason_names_the_best_value_and_its_round() -> None:
    words = why_stop(records(0.3, 0.5, 0.4), Stop(patience=1, figure="f1"))
    assert words == "f1 on validation data has not improved for 1 evaluations; its best is 50.00 % in round 2"


def test_a_run_that_does_not_improve_ends_early_with_a_result() -> None:
    """The first evaluation is the best, two more do not better it: three rounds."""
    run = Run(STILL)
    done = list(run)
    assert len(done) == 3
    assert run.result is not None
    assert run.result.rounds == 3
    assert "not improved for 2 evaluations" in run.result.stopped
    assert run.result.clients


def test_what_is_looked_at_is_the_validation_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation figure is that of an evaluation on the validation parts, and stopping leaves the figures alone."""
    validated = [r.metrics for r in Run(replace(STILL, stop=Stop(), evaluation=Evaluation(part="validation")))]
    stopping, plain = Run(STILL), Run(replace(STILL, stop=Stop()))
    both = list(zip(stopping, plain, strict=False))
    for (one, other), metrics in zip(both, validated, strict=False):
        assert one.metrics == other.metrics
        assert metrics is not None
        assert metrics.clients is not None
        assert metrics.clients.global_ is not None
        known = (metrics.clients.global_.mean, metrics.clients.global_.balanced_accuracy)
        assert one.validation in known
        assert other.validation is None


def test_a_method_s_closing_stage_is_carried_out_all_the_same() -> None:
    run = Run(replace(STILL, method=CCVR()))
    assert [record.stage for record in run] == ["train"] * 3 + ["calibrate"]


def test_a_resumed_run_stops_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = Run(STILL)
    list(whole)
    begun = Run(STILL, out=tmp_path / "run", checkpoint_every=1)
    for record in begun:
        if record.round == 1:
            break
    begun.directory.close()
    again = resume(tmp_path / "run")
    assert [record.round for record in again] == [2]
    assert again.result is not None
    assert whole.result is not None
    assert again.result.digest == whole.result.digest
    assert again.result.stopped == whole.result.stopped
    done = resume(tmp_path / "run")
    assert list(done) == []
    assert done.result == again.result == read_run(tmp_path / "run").result


def test_stopping_without_validation_data_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"stop needs validation data, .* --set holdout.validation=0.2"):
        Run(replace(STILL, holdout=Holdout()))
    with pytest.raises(UsageError, match="unknown goal 'f3'"):
        Run(replace(STILL, stop=Stop(patience=2, figure="f3")))


def test_the_rule_is_a_table_of_settings_and_left_out_where_there_is_none() -> None:
    assert from_dict(STILL.as_dict()) == STILL
    assert "stop" not in replace(STILL, stop=Stop()).as_dict()


def test_the_command_line_takes_the_rule(fedskew: Any) -> None:
    few = ["run", "--rounds", "9", "--split", "iid:clients=3", "--model", "mlp:hidden=4", "--set", "training.lr=1e-12"]
    done = fedskew(*few, "--set", "holdout.validation=0.2", "--stop", "patience=2,figure=f1")
    assert "round 3/9" in done.out
    assert "stopped: f1 on validation data has not improved for 2 evaluations" in done.out
    assert "needs validation data" in fedskew(*few, "--stop", "patience=2").err
    for wrong in ("10", "patience", "patience=-1", "figure=f1", "patience=2,figur=f1"):
        done = fedskew(*few, "--stop", wrong)
        assert done.code == 2
        assert len(done.err.strip().splitlines()) == 1
