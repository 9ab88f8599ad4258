"""The progress file of a study: what is kept, when it is written, and that it never stands in a study's way."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fedskew.experiment import progress
from fedskew.experiment.live import FAILURE, LOCK, is_locked
from fedskew.experiment.progress import PROGRESS, ProgressWriter, Step, StudyProgress

TASK = StudyProgress(kind="board", title="a task", figure="global", mark="these settings")


def kept(folder: Path) -> StudyProgress:
    return msgspec.json.decode((folder / PROGRESS).read_bytes(), type=StudyProgress)


def step(method: str, value: float = 0.5) -> Step:
    return Step(method=method, part="seed 0", value=value)


def test_the_folder_is_locked_while_a_study_goes_on_and_says_how_it_ended(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path / "t1", TASK) as writer:
        assert is_locked(tmp_path / "t1" / LOCK, tmp_path / "t1" / PROGRESS)
        writer.add(step("fedavg"))
        writer.tell("fedavg seed 0", 1, 2, 60.0)
        assert not kept(tmp_path / "t1").finished
    assert not is_locked(tmp_path / "t1" / LOCK, tmp_path / "t1" / PROGRESS)
    over = kept(tmp_path / "t1")
    assert (over.finished, over.done, over.total, over.now, over.steps) == (True, 2, 2, "", [step("fedavg")])


@pytest.mark.parametrize(("error", "failed"), [(KeyboardInterrupt, False), (ValueError, True)])
def test_an_error_is_kept_and_an_interruption_is_none(tmp_path: Path, error: type[BaseException], failed: bool) -> None:
    with pytest.raises(error), ProgressWriter(tmp_path, TASK):
        raise error("why")
    assert (tmp_path / FAILURE).exists() is failed
    assert not kept(tmp_path).finished
    with ProgressWriter(tmp_path, TASK):
        assert not (tmp_path / FAILURE).exists()


def test_it_is_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressWriter(tmp_path, TASK) as writer:
        now = 100.9
        writer.tell("early", 1, 9, 1.0)
        assert kept(tmp_path).now == ""
        now = 101.0
        writer.tell("in time", 2, 9, 1.0)
        assert kept(tmp_path).now == "in time"


def test_runs_of_an_earlier_command_stay_unless_the_settings_changed(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path, TASK) as writer:
        writer.add(step("fedavg"))
    with ProgressWriter(tmp_path, TASK) as writer:
        writer.add(step("fedprox"))
    assert [one.method for one in kept(tmp_path).steps] == ["fedavg", "fedprox"]
    with ProgressWriter(tmp_path, msgspec.structs.replace(TASK, mark="others")):
        pass
    assert kept(tmp_path).steps == []


def test_of_two_processes_in_one_folder_the_second_works_but_writes_nothing(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path, TASK) as first:
        first.tell("the first", 1, 2, 1.0)
        before = (tmp_path / PROGRESS).read_bytes()
        with ProgressWriter(tmp_path, TASK) as second:
            second.add(step("fedavg"))
            second.tell("the second", 1, 2, 1.0)
        assert (tmp_path / PROGRESS).read_bytes() == before
        assert is_locked(tmp_path / LOCK, tmp_path / PROGRESS)


def test_a_place_that_cannot_be_written_does_not_end_a_study(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with ProgressWriter(tmp_path / "file" / "t1", TASK) as writer:
        writer.tell("it goes on", 1, 2, 1.0)


def test_a_value_that_is_not_finite_can_be_read_again(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path, TASK) as writer:
        writer.add(Step(method="fedavg", part="seed 0", value=float("nan"), curve=[(1, 0.5), (2, float("nan"))]))
    assert kept(tmp_path).steps == [Step(method="fedavg", part="seed 0", value=None, curve=[(1, 0.5)])]
