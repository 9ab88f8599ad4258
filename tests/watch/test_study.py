"""Studies in the list: tasks of the board and races of `advise`, from their progress files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedskew.evaluation.figures import FIGURES
from fedskew.experiment.progress import PROGRESS, ProgressWriter, Step, StudyProgress
from fedskew.studies.board import tasks
from fedskew.studies.board.metering import Meter
from fedskew.studies.board.running import run_board
from fedskew.studies.board.tasks import TaskFile, load_task
from fedskew.watch import folder as folder_module
from fedskew.watch import study
from fedskew.watch.app import snapshot
from fedskew.watch.folder import Folder
from helpers.boards import write_tiny
from helpers.made_runs import make_run

RACE = StudyProgress(kind="advise", title="advice on digits", figure="personal", unit="rounds", total=9)


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "INTERVAL", 0.0)
    monkeypatch.setattr("fedskew.experiment.progress.SPACING", 0.0)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFile:
    monkeypatch.setattr(tasks, "HOME", write_tiny(tmp_path / "tasks"))
    return load_task("tiny")


def events(runs: Path) -> dict[str, Any]:
    found, whole = snapshot(Folder(runs), "")
    assert whole
    return {name: json.loads(text) for name, text in found.items()}


def write(folder: Path, progress: StudyProgress, *steps: Step) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = msgspec.structs.replace(progress, steps=list(steps))
    (folder / PROGRESS).write_bytes(msgspec.json.encode(whole))


def test_a_board_shows_which_run_it_is_at_and_then_every_finished_cell(tiny: TaskFile, tmp_path: Path) -> None:
    """One method with two rates and two seeds, four rounds each: four runs."""
    seen: list[dict[str, Any]] = []
    meter = Meter([tiny], 1, lambda *said: seen.append(events(tmp_path / "runs")))
    ((_, tried),) = run_board([tiny], ["fedavg"], tmp_path / "runs", meter, workers=1)
    third = next(one for one in seen if one["run"]["row"]["round"] == 2 and "seed 0" in one["run"]["row"]["now"])
    row = third["run"]["row"]
    assert (row["state"], row["rounds"], row["unit"], row["name"]) == ("running", 4, "runs", "tiny")
    assert row["title"] == "tiny: digits, five clients"
    assert row["ends"] > row["written"]
    assert third["part-cells"]["columns"] == ["method", "lr 0.01", "lr 0.1", "mean over seeds"]
    over = events(tmp_path / "runs")
    assert (over["run"]["row"]["state"], over["run"]["row"]["round"]) == ("finished", 4)
    values = [cell.curve[-1].figures["global"] or 0.0 for cell in tried.cells.values()]
    shown = over["part-cells"]["rows"][0]
    assert shown[3:] == [f"{100 * v:.2f}" for v in (*values, sum(values) / 2)]
    curve = over["part-curves"]["views"][0]["series"][0]
    assert (curve["name"], [point[0] for point in curve["points"]]) == ("fedavg", [1, 2, 3, 4])


def test_a_board_of_an_earlier_version_is_shown_once_it_is_resumed(tiny: TaskFile, tmp_path: Path) -> None:
    """Its folder has cells but no progress file: the cells are read, not run, and all are shown."""
    runs = tmp_path / "runs"
    list(run_board([tiny], ["fedavg"], runs, Meter([tiny], 1, lambda *said: None), workers=1))
    (runs / "tiny" / PROGRESS).unlink()
    assert events(runs)["list"]["runs"] == []
    ran: list[object] = []
    list(run_board([tiny], ["fedavg"], runs, Meter([tiny], 1, lambda *said: ran.append(said)), workers=1))
    assert ran == []
    over = events(runs)
    assert over["run"]["row"]["state"] == "finished"
    assert all(over["part-cells"]["rows"][0])


def test_an_interrupted_board_is_stopped_and_a_broken_one_failed(tiny: TaskFile, tmp_path: Path) -> None:
    for error, state in ((KeyboardInterrupt, "stopped"), (OSError("the disk is full"), "failed")):

        def stop(*said: object, error: Any = error) -> None:
            raise error

        with pytest.raises((KeyboardInterrupt, OSError)):
            list(run_board([tiny], ["fedavg"], tmp_path / state, Meter([tiny], 1, stop), workers=1))
        row = events(tmp_path / state)["run"]["row"]
        assert (row["state"], row["round"], row["now"]) == (state, 0, "")
    assert row["why"] == "OSError: the disk is full"


def test_the_best_method_comes_first_and_one_that_failed_says_why(tmp_path: Path) -> None:
    """In a race, who trained for more rounds is ahead of who left earlier. `central` has only a trial yet."""
    write(
        tmp_path / "race",
        RACE,
        Step(method="fedavg", part="seed 0", value=0.5, rounds=9, curve=[(9, 0.5)]),
        Step(method="fedprox", part="seed 0", value=0.625, rounds=9, curve=[(9, 0.625)]),
        Step(method="fedprox", part="seed 1", value=0.75, rounds=9, curve=[(9, 0.75)]),
        Step(method="scaffold", part="seed 0", value=0.875, rounds=3),
        Step(method="local", part="seed 0", value=None, failed="<b>too few samples</b>"),
        Step(method="central", part="lr 0.1", value=0.9, trial=True),
    )
    found = events(tmp_path)
    cells = found["part-cells"]
    assert cells["columns"] == ["method", "rounds", "lr 0.1", "seed 0", "seed 1", "mean over seeds"]
    assert [row[0] for row in cells["rows"]] == ["fedprox", "fedavg", "scaffold", "local", "central"]
    assert cells["rows"][0] == ["fedprox", "9", "", "62.50", "75.00", "68.75"]
    assert cells["rows"][3][3] == "failed"
    assert cells["list"] == ["local, seed 0: <b>too few samples</b>"]
    assert [s["name"] for s in found["part-curves"]["views"][0]["series"]] == ["fedprox", "fedavg"]


def test_methods_with_equally_many_seeds_are_ordered_by_the_figure_and_only_whole_means_are_shown() -> None:
    """Of `local` one of two seeds is finished: its mean cannot be compared, however high it is."""
    values = {"fedavg": (0.5, 0.6), "fedprox": (0.7, 0.8), "local": (0.9,)}
    steps = [Step(method=m, part=f"seed {i}", value=v) for m, of in values.items() for i, v in enumerate(of)]
    lower = next(figure for figure in FIGURES.values() if figure.better == "lower")
    assert list(study.by_method(steps, lower)) == ["fedavg", "fedprox", "local"]
    found = study.by_method(steps, FIGURES["global"])
    table = study.cells(found, FIGURES["global"], "")
    assert table is not None
    assert [(row[0], row[-1]) for row in table["rows"]] == [("fedprox", "75.00"), ("fedavg", "55.00"), ("local", "")]


def test_a_race_that_is_running_comes_before_its_runs_and_they_are_listed_too(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path / "advise", RACE):
        make_run(tmp_path / "advise" / "runs" / "fedavg", rounds=1)
        names = [row.name for row in Folder(tmp_path).look()]
    assert names == ["advise", "advise/runs/fedavg"]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"kind": "other"}', b'{"kind":"board","title":"x","figure":"no such"}'])
def test_a_broken_progress_file_breaks_neither_the_list_nor_the_page(tmp_path: Path, text: bytes) -> None:
    make_run(tmp_path / "one", rounds=1)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / PROGRESS).write_bytes(text)
    folder = Folder(tmp_path)
    for row in folder.look():
        snapshot(folder, row.id)
    assert len(folder.rows) == 2


def test_no_link_to_a_progress_file_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside", msgspec.structs.replace(RACE, title="a secret"))
    (tmp_path / "runs" / "study").mkdir(parents=True)
    (tmp_path / "runs" / "study" / PROGRESS).symlink_to(tmp_path / "outside" / PROGRESS)
    assert "a secret" not in json.dumps(events(tmp_path / "runs"))
