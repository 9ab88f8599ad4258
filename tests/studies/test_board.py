"""The board: tasks, cells, what is made of them, and how it is verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fedskew.core.settings import UsageError
from fedskew.methods import REGISTRY
from fedskew.studies.board import cells, evidence, running, tasks
from fedskew.studies.board.cells import Trial, do_cell, do_trial
from fedskew.studies.board.evidence import Task, read_task, shipped, write_task
from fedskew.studies.board.metering import Meter
from fedskew.studies.board.running import all_methods, chosen_rate, finished, run_board, run_method
from fedskew.studies.board.statistics import competes, keeps_state, make_task, ordered, tally
from fedskew.studies.board.tasks import TaskFile, load_task, load_tasks
from fedskew.studies.board.verification import verify_cell
from fedskew.studies.execution import Outcome
from helpers.boards import FLAT, SMALL, made_cell, made_method, made_task, write_tiny
from helpers.records import a_record

METHODS = ["fedavg", "fedprox"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFile:
    monkeypatch.setattr(tasks, "HOME", write_tiny(tmp_path / "tasks"))
    return load_task("tiny")


def quiet(task: TaskFile, methods: int = 2) -> Meter:
    return Meter([task], methods, lambda *said: None)


def run_all(task: TaskFile, out: Path) -> Task:
    tried = [each for _, each in run_board([task], METHODS, out, quiet(task), workers=1)]
    return make_task(task, tried, METHODS)


def test_every_shipped_task_can_be_read_and_every_method_is_on_the_board() -> None:
    assert tasks.names() == ["t6", "t1", "t2", "t3", "t0", "t5", "t4"]
    for task in load_tasks([]):
        assert task.cell("fedavg", task.rates[0], 1).seed == 1
        assert task.experiment["split"].count("public:") == 1, "methods with public data share the clients of others"
    assert sorted(all_methods()) == sorted(REGISTRY)
    assert all_methods()[:5] == ["fedavg", "fedavgm", "finetune", "local", "central"]


def test_the_evidence_that_ships_can_be_read_and_was_not_changed_by_hand() -> None:
    for task in shipped():
        assert task.seal, f"{task.name} has no seal"
        assert not task.commit.endswith("-dirty")


def test_a_tiny_board_runs_whole_and_again_from_its_files(tiny: TaskFile, tmp_path: Path) -> None:
    first = run_all(tiny, tmp_path / "runs")
    assert [row.method for row in first.rows if row.seeds == 2] == [row.method for row in first.rows]
    assert {row.method for row in first.rows} == set(METHODS)
    assert not first.missing
    assert all(row.rates.keys() == {"0.01", "0.1"} for row in first.rows)
    fedavg = next(row for row in first.rows if row.method == "fedavg")
    assert fedavg.value == pytest.approx(sum(fedavg.values.values()) / 2)
    assert fedavg.costs["times_fedavg"] == 1.0
    assert len(first.curve.mean) == 4
    read = [finished(tiny, name, tmp_path / "runs" / "tiny") for name in METHODS]
    assert make_task(tiny, read, METHODS) == first


def test_an_interrupted_board_goes_on_where_it_stopped(
    tiny: TaskFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_all(tiny, tmp_path / "whole")
    ran: list[int] = []
    real = cells.execute

    def stop_at_the_fifth(*given: Any, **options: Any) -> Outcome:
        ran.append(1)
        if len(ran) == 5:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(cells, "execute", stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        run_all(tiny, tmp_path / "cut")
    part = [finished(tiny, name, tmp_path / "cut" / "tiny") for name in METHODS]
    assert make_task(tiny, part, METHODS).missing == ["fedprox"]
    ran[:] = [0] * 10  # no further interruption
    resumed = run_all(tiny, tmp_path / "cut")
    assert len(ran) == 10 + 4, "four of eight runs were left"
    assert [row.digests for row in resumed.rows] == [row.digests for row in whole.rows]


def test_a_result_of_other_settings_is_not_used(tiny: TaskFile, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run_method(tiny, "fedavg", folder, quiet(tiny), workers=1)
    longer = replace(tiny, experiment=tiny.experiment | {"rounds": 5})
    assert finished(tiny, "fedavg", folder).whole(tiny)
    assert not finished(longer, "fedavg", folder).trials
    cells.cell_path(folder, "fedavg", 0).write_text("{broken")
    assert list(finished(tiny, "fedavg", folder).cells) == [1]


def test_the_test_set_never_chooses_a_learning_rate(tiny: TaskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the test labels shuffled, every trial comes to the same value; the cell does not."""
    experiment = tiny.cell("fedavg", 0.1, 0)
    honest, cell = do_trial(experiment, 0.1, None, workers=1), do_cell(experiment, None, workers=1)
    data = cells.named_data("digits", None)
    planted = replace(data, y_test=np.random.default_rng(0).permutation(data.y_test))
    monkeypatch.setattr(cells, "named_data", lambda name, folder: planted)
    assert do_trial(experiment, 0.1, None, workers=1) == honest
    assert do_cell(experiment, None, workers=1).digest != cell.digest


def test_the_rate_with_the_best_validation_value_is_taken_and_a_failed_one_is_not() -> None:
    task = replace(SMALL, rates=(0.1, 0.2, 0.3))
    trials = {0.1: Trial(mark="", value=0.4), 0.2: Trial(mark="", value=0.6), 0.3: Trial(mark="", value=None)}
    assert chosen_rate(task, trials) == 0.2
    assert chosen_rate(task, {0.1: trials[0.1]}) is None, "not all rates have been tried"
    assert chosen_rate(task, dict.fromkeys(task.rates, trials[0.3])) is None


def test_a_method_that_cannot_run_is_a_row_with_the_reason(tiny: TaskFile, tmp_path: Path) -> None:
    tried = run_method(tiny, "ratioloss", tmp_path, quiet(tiny), workers=1)  # the tiny split has no public set
    assert tried.rate is None
    assert tried.whole(tiny)
    (row,) = make_task(tiny, [tried], ["ratioloss"]).rows
    assert (row.seeds, row.value, row.lr) == (0, None, 0.0)
    assert "needs public data" in row.note


def test_an_error_in_a_method_does_not_end_the_board_and_is_tried_again(
    tiny: TaskFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **options: Any) -> Outcome:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(cells, "execute", broken)
        trial = do_trial(tiny.cell("fedavg", 0.1, 0), 0.1, tmp_path / "trial.json", workers=1)
    assert "ZeroDivisionError: planted" in trial.failed
    assert do_trial(tiny.cell("fedavg", 0.1, 0), 0.1, tmp_path / "trial.json", workers=1).value is not None


def test_differences_are_paired_by_seed_and_have_an_interval() -> None:
    """fedprox is ahead by 0.1, 0.2 and 0.3: mean 0.2, margin 4.303 * 0.1 / sqrt(3) = 0.248, which includes 0."""
    base = made_method("fedavg", *(made_cell((0.5, 0.6, 0.6, v)) for v in (0.4, 0.5, 0.6)))
    prox = made_method("fedprox", *(made_cell((0.5, 0.6, 0.6, v)) for v in (0.5, 0.7, 0.9)))
    task = make_task(SMALL, [base, prox], METHODS)
    best, fedavg = task.rows
    assert best.over == pytest.approx(0.2)
    assert best.margin == pytest.approx(0.2484, abs=1e-4)
    assert best.outcome == "tie"
    assert best.tied
    assert fedavg.tied, "its interval to the best includes 0"
    assert best.last_five == pytest.approx((0.5 + 0.6 + 0.6 + 0.7) / 4)


def test_wins_and_losses_need_an_interval_without_zero() -> None:
    task = made_task(lead=0.05)
    outcomes = {row.method: row.outcome for row in task.rows}
    assert outcomes == {
        "fedprox": "win",
        "ratioloss": "win",
        "fedavg": "",
        "scaffold": "tie",
        "fedgen": "loss",
        "local": "loss",
    }
    assert {row.method for row in task.rows if row.tied} == {"fedprox", "scaffold"}
    assert tally([task, task])["fedprox"] == {"win": 2, "tie": 0, "loss": 0}


def test_a_method_that_diverged_with_one_seed_has_lost() -> None:
    base = made_method("fedavg", *[made_cell()] * 3)
    bad = made_method("fedprox", made_cell(), made_cell(), made_cell(failed="the run diverged"))
    task = make_task(SMALL, [base, bad], METHODS)
    row = next(row for row in task.rows if row.method == "fedprox")
    assert (row.seeds, row.failed, row.outcome) == (2, 1, "loss")
    assert row.note == "the run diverged"


def test_methods_with_public_data_and_controls_are_not_called_the_best() -> None:
    task = made_task(lead=0.0)
    rows = {row.method: row for row in task.rows}
    assert task.rows[0].method == "ratioloss"
    assert rows["ratioloss"].public
    assert not rows["ratioloss"].tied
    assert rows["fedavg"].tied
    assert [competes(name) for name in ("fedavg", "ratioloss", "local", "central", "publiconly")] == [True] + [
        False
    ] * 4


def test_half_trained_fedavg_is_flagged_and_nobody_is_ranked() -> None:
    task = made_task(curve=(0.2, 0.3, 0.4, 0.5))
    assert "still rises" in task.unsettled
    assert not task.ranked
    assert not any(row.outcome or row.tied for row in task.rows)
    assert tally([task])["fedprox"] == {"win": 0, "tie": 0, "loss": 0}
    near_chance = made_task(curve=(0.1, 0.11, 0.1, 0.1))
    assert "near chance" in near_chance.unsettled
    nothing = make_task(SMALL, [made_method("fedprox", *[made_cell()] * 3)], METHODS)
    assert nothing.unsettled == "fedavg has no finished run"


def test_costs_to_fedavgs_level_are_those_of_the_first_evaluation_that_reaches_it() -> None:
    """FedAvg's level is the mean of its last five evaluations, 0.575. fedprox reaches it in round 2: 200 bytes, 4 s."""
    base = made_method("fedavg", *[made_cell(FLAT)] * 3)
    prox = made_method("fedprox", *[made_cell((0.5, 0.58, 0.57, 0.59))] * 3)
    never = made_method("fedgen", *[made_cell((0.5, 0.51, 0.52, 0.53))] * 3)
    rows = {row.method: row for row in make_task(SMALL, [base, prox, never], METHODS).rows}
    assert (rows["fedprox"].costs["rounds_to_fedavg"], rows["fedprox"].costs["bytes_to_fedavg"]) == (2, 200)
    assert rows["fedprox"].costs["seconds_to_fedavg"] == 4.0
    assert rows["fedgen"].costs["bytes_to_fedavg"] is None


def test_own_models_are_compared_client_by_client() -> None:
    """Clients gain 0.1 and 0.3 with each seed: mean 0.2, and the interval over clients lies between these two."""
    base = made_method("fedavg", *[made_cell(own=(0.5, 0.5))] * 3)
    own = made_method("ditto", *[made_cell(own=(0.6, 0.8))] * 3)
    row = next(row for row in make_task(SMALL, [base, own], METHODS).rows if row.method == "ditto")
    assert row.own_over == pytest.approx(0.2)
    assert row.own_low is not None
    assert row.own_high is not None
    assert 0.1 <= row.own_low < 0.2 < row.own_high <= 0.3


def test_a_clients_own_model_is_compared_with_fedavgs_under_the_same_seed() -> None:
    """Seeds differ far more than methods: clients gain 0.1 and 0.3 with each of three very different seeds."""
    levels = [(0.5, 0.5), (0.1, 0.6), (0.3, 0.2)]
    base = made_method("fedavg", *(made_cell(own=own) for own in levels))
    own = made_method("ditto", *(made_cell(own=(a + 0.1, b + 0.3)) for a, b in levels))
    row = next(row for row in make_task(SMALL, [base, own], METHODS).rows if row.method == "ditto")
    assert row.own_low is not None
    assert row.own_high is not None
    assert 0.0999 <= row.own_low < 0.2 < row.own_high <= 0.3001


def test_a_curve_has_all_bytes_and_seconds_until_each_evaluation() -> None:
    """Three rounds of 10 bytes up, 30 down, 1 s of clients and 0.5 of the server; the second is not evaluated."""
    spent: dict[str, Any] = {"bytes_up": {"parameters": 10}, "bytes_down": {"parameters": 25, "control": 5}}
    spent |= {"client_seconds": 1.0, "server_seconds": 0.5}
    points = cells.curve([a_record(0, 0.5, **spent), a_record(1, None, **spent), a_record(2, 0.6, **spent)])
    assert [(p.round, p.figures["global"], p.bytes, p.seconds) for p in points] == [
        (1, 0.5, 40, 1.5),
        (3, 0.6, 120, 4.5),
    ]


def test_what_a_client_keeps_is_measured() -> None:
    assert not keeps_state("fedavg")
    assert keeps_state("scaffold")


def test_a_cell_is_verified_and_a_changed_digest_is_noticed(tiny: TaskFile, tmp_path: Path) -> None:
    task = run_all(tiny, tmp_path / "runs")
    assert verify_cell("tiny/fedprox/1", [task], workers=1).same
    wrong = [msgspec.structs.replace(row, digests=row.digests | {1: "0" * 64}) for row in task.rows]
    assert not verify_cell("tiny/fedprox/1", [msgspec.structs.replace(task, rows=wrong)], workers=1).same
    wrong = [msgspec.structs.replace(row, values=row.values | {1: 0.99}) for row in task.rows]
    found = verify_cell("tiny/fedprox/1", [msgspec.structs.replace(task, rows=wrong)], workers=1)
    assert not found.same
    assert found.value == 0.99
    other = msgspec.structs.replace(task, cpu="abacus", versions={"torch": "0.1"})
    assert [text.partition(" is ")[0] for text in verify_cell("tiny/fedavg/0", [other], workers=1).differs] == [
        "the CPU",
        "torch",
    ]


def test_a_method_without_a_server_model_has_a_digest_of_its_own(tiny: TaskFile) -> None:
    one, two = (do_cell(tiny.cell("local", rate, 0), None, workers=1).digest for rate in (0.05, 0.1))
    assert one != two


def test_a_file_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    path = write_task(made_task(), tmp_path)
    assert read_task(path).rows[0].method == "fedprox"
    text = path.read_text()
    path.write_text(text.replace('"method": "fedprox"', '"method": "fedmine"'))
    with pytest.raises(UsageError, match="was changed"):
        read_task(path)
    task = msgspec.json.decode(text, type=Task)
    better = [msgspec.structs.replace(row, value=0.99) for row in task.rows]
    path = write_task(msgspec.structs.replace(task, rows=better), tmp_path)  # with a new seal
    with pytest.raises(UsageError, match="not the mean of its seeds"):
        read_task(path)


@pytest.mark.parametrize("text", ["", "[]", '{"name": 3}', "[" * 100_000])
def test_a_file_that_is_no_task_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "t1.json").write_text(text)
    with pytest.raises(UsageError, match="is not a task of the board"):
        evidence.read_tasks(tmp_path)


def test_time_left_counts_runs_by_their_size(tiny: TaskFile) -> None:
    """Two methods on tasks of 1 and 10 s a run, 4 runs each: 88 s for FedAvg, twice that before anything is known."""
    said: list[float] = []
    small, large = replace(tiny, seconds=1.0), replace(tiny, seconds=10.0)
    meter = Meter([small, large], 2, lambda done, total, seconds, text, at: said.append(seconds))
    assert meter.total == 16
    assert meter.seconds_left() == 176
    with meter.run(small, "a run that is only read"):
        pass
    assert meter.seconds_left() == 174
    meter.spent, meter.expected = 3.0, 1.0
    assert meter.seconds_left() == 3 * 87
    with meter.run(large, "a run that is run") as watch:
        watch(SimpleNamespace(rounds=1), a_record(0))  # type: ignore[arg-type]
    assert meter.expected == 11.0, "a second of FedAvg, and ten"
    assert meter.seconds_left() == pytest.approx(77 * 3 / 11, rel=0.1)


@pytest.fixture(autouse=True)
def forget_data() -> Iterator[None]:
    yield
    cells.named_data.cache_clear()
    assert running.FIRST[0] == "fedavg"


def test_methods_are_ordered_by_wins_less_losses_and_a_failed_one_has_lost() -> None:
    """fedprox wins; with a seed that failed it comes last, though its mean is the best."""
    task = made_task()
    change = msgspec.structs.replace
    assert ordered([task])[:2] == ["fedavg", "fedprox"]
    rows = [change(row, failed=1, outcome="loss") if row.method == "fedprox" else row for row in task.rows]
    assert ordered([change(task, rows=rows)])[-1] == "fedprox"
    own = [change(row, own_over=0.3, own_margin=0.1) if row.method == "scaffold" else row for row in task.rows]
    assert ordered([change(task, rows=own)], own=True)[1] == "scaffold"
    assert ordered([change(task, unsettled="rises")]) == ["fedavg", *sorted({r.method for r in rows} - {"fedavg"})]
