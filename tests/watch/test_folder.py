"""What the watcher reads: states, time left, curves; and what it must not read or run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from fedskew.core.settings import UsageError
from fedskew.evaluation.metrics import Metrics
from fedskew.experiment import live
from fedskew.experiment.config import Experiment
from fedskew.experiment.live import FAILURE, Lines, append_clients, is_locked, last_records
from fedskew.experiment.run import Run
from fedskew.experiment.run_writer import RunWriter
from fedskew.federation.protocol import QuorumLost, Record
from fedskew.watch import folder as folder_module
from fedskew.watch.app import snapshot
from fedskew.watch.folder import Folder, run_folders
from fedskew.watch.history import History
from fedskew.watch.watched import Watched, described
from helpers.made_runs import add_round, make_run, metrics
from helpers.records import a_result

QUICK = Experiment(split="iid:clients=2", model="mlp:hidden=4", rounds=3)


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "INTERVAL", 0.0)


def events(runs: Path | Folder, id: str = "") -> dict[str, Any]:
    """What a page is sent about a folder."""
    found, whole = snapshot(runs if isinstance(runs, Folder) else Folder(runs), id)
    assert whole
    return {name: json.loads(text) for name, text in found.items()}


def the_state(runs: Path) -> tuple[str, str]:
    row = Folder(runs).look()[0]
    return row.state, row.why


# state and time left


def test_a_run_is_running_while_its_lock_is_held_and_stopped_when_not(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=1)
    assert the_state(tmp_path) == ("stopped", "")
    with filelock.FileLock(path / ".lock"):
        assert the_state(tmp_path) == ("running", "")
    assert the_state(tmp_path) == ("stopped", "")


def test_a_result_makes_a_run_finished_and_one_that_diverged_failed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=1)
    (path / "result.json").write_text(json.dumps(a_result(0.5, stopped="no progress").as_dict()))
    assert the_state(tmp_path) == ("finished", "no progress")
    (path / "result.json").write_text(json.dumps(a_result(0.1, diverged="the loss is not finite").as_dict()))
    assert the_state(tmp_path) == ("failed", "the loss is not finite")


def test_an_error_is_kept_as_the_reason_of_a_failed_run_and_forgotten_when_it_goes_on(tmp_path: Path) -> None:
    broken = replace(QUICK, trouble=replace(QUICK.trouble, fault="nan:client=0,round=1", quorum=2))
    with pytest.raises(QuorumLost):
        list(Run(broken, out=tmp_path / "one"))
    state, why = the_state(tmp_path)
    assert state == "failed"
    assert why.startswith("QuorumLost: ")
    again = Run(broken, out=tmp_path / "one", resume=True)
    assert not (tmp_path / "one" / FAILURE).exists()
    assert the_state(tmp_path) == ("running", "")
    assert again.directory is not None
    again.directory.close()


def test_a_run_that_its_user_ends_is_stopped_not_failed(tmp_path: Path) -> None:
    run = Run(QUICK, out=tmp_path / "one")
    rounds = iter(run)
    next(rounds)
    with pytest.raises(KeyboardInterrupt):
        rounds.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert the_state(tmp_path) == ("stopped", "")


def test_the_time_left_is_that_of_the_remaining_rounds(tmp_path: Path) -> None:
    """Ten rounds of 10 s, four are done: 60 s after the last record."""
    path = make_run(tmp_path / "one", rounds=4)
    with filelock.FileLock(path / ".lock"):
        row = Folder(tmp_path).look()[0]
        assert row.ends == pytest.approx(row.written + 60, abs=0.2)
        assert (row.round, row.rounds) == (4, 10)
    assert Folder(tmp_path).look()[0].ends is None


def test_looking_at_a_lock_does_not_make_a_starting_run_fail(tmp_path: Path) -> None:
    """The watcher's shared lock is held for a moment; a run tries for longer than that."""
    from threading import Timer

    (tmp_path / ".lock").touch()
    if not live.HAS_LOCKS:
        pytest.skip("this system has no such locks")
    handle = os.open(tmp_path / ".lock", os.O_RDONLY)
    live.flock(handle, live.LOCK_SH)
    Timer(0.05, os.close, [handle]).start()
    directory = RunWriter(tmp_path)
    assert is_locked(tmp_path / ".lock", tmp_path / "records.jsonl")
    directory.close()


# records as they are written


def test_new_records_are_read_once_and_a_file_cut_off_is_read_anew(tmp_path: Path) -> None:
    path, lines = make_run(tmp_path / "one", rounds=2) / "records.jsonl", Lines(Record)
    assert [r.round for r in lines.read(path)[1]] == [0, 1]
    assert lines.read(path) == (False, [])
    first = path.read_bytes().splitlines(keepends=True)[0]
    add_round(path.parent, 2)
    with path.open("ab") as file:
        file.write(b'{"number": 4, "rou')  # being written
    assert [r.round for r in lines.read(path)[1]] == [2]
    path.write_bytes(first)
    add_round(path.parent, 1, accuracy=0.9)
    anew, records = lines.read(path)
    assert (anew, [r.round for r in records]) == (True, [0, 1])


def test_a_resumed_run_shows_its_new_rounds_not_those_it_lost(tmp_path: Path) -> None:
    path, history = make_run(tmp_path / "one", rounds=3), History()
    history.update(path, 1.0)
    assert history.costs["seconds"] == 30.0
    lines = (path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (path / "records.jsonl").write_bytes(lines[0])
    add_round(path, 1, accuracy=0.75)
    history.update(path, 1.0)
    assert history.values("global", 100) == {1: 50.0, 2: 75.0}
    assert history.costs["seconds"] == 20.0
    assert [line.values for line in history.shown_clients()] == [[0.5, 0.25], [0.75, 0.375]]


def test_late_figures_of_clients_are_shown_in_the_round_they_belong_to(tmp_path: Path) -> None:
    path, history = make_run(tmp_path / "one"), History()
    bare = metrics(0.5)
    add_round(path, 0, metrics=type(bare)(global_=bare.global_))
    history.update(path, 1.0)
    assert history.values("personal", 100) == {}
    add_round(path, 1, before=metrics(0.25), metrics=type(bare)(global_=bare.global_))
    history.update(path, 1.0)
    assert history.values("personal", 100) == {1: 25.0}


def test_a_run_whose_last_figures_are_still_to_come_shows_those_before(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", data="sites", split="dirichlet:alpha=0.3,clients=10")
    add_round(path, 0, metrics=Metrics())
    add_round(path, 1, before=metrics(0.25), metrics=Metrics())
    row = Folder(tmp_path).look()[0]
    assert row.value == "25.00 %"
    assert row.title == "fedavg on the sites' own data"


def test_the_last_records_are_found_without_reading_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "one", rounds=40) / "records.jsonl"
    monkeypatch.setattr(live, "TAIL", 10)  # shorter than a line: more is read until there is one
    assert last_records(path, 20)[-1].round == 39
    assert last_records(path, 1)[0].round == 39


def test_figures_of_imbalanced_data_lead_the_curves(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    skewed = {"samples": [90, 10], "predicted": [90, 10], "balanced_accuracy": 0.6, "macro_f1": 0.5}
    add_round(path, 0, metrics=metrics(0.9, **skewed))
    found = events(tmp_path)
    assert found["run"]["row"]["value"] == "60.00 %"
    assert found["part-curves"]["views"][0]["name"] == "global model: balanced accuracy"


def test_ten_thousand_rounds_become_a_page_of_a_few_hundred_points(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=1)
    line = (path / "records.jsonl").read_bytes()
    late = (
        line.replace(b'"round":0', b'"round":%d' % n).replace(b'"number":1', b'"number":%d' % (n + 1))
        for n in range(10_000)
    )
    (path / "records.jsonl").write_bytes(b"".join(late))
    folder = Folder(tmp_path)
    while not (answer := snapshot(folder, ""))[1]:
        pass
    text = answer[0]["part-curves"]
    points = json.loads(text)["views"][0]["series"][0]["points"]
    assert points[-1][0] == 10_000
    assert len(points) < 4_000
    assert sum(map(len, answer[0].values())) < 1_000_000


def test_of_ten_thousand_clients_every_hundredth_and_the_ten_worst_are_recorded(tmp_path: Path) -> None:
    """Client c has accuracy c / 10,000, but client 4,321 has none right: it is no hundredth, and must be found."""
    path = make_run(tmp_path / "one", rounds=1)
    (path / "client_accuracy.jsonl").unlink()
    figures = {c: (c / 10_000, 1 - c / 10_000) for c in range(10_000)} | {4_321: (0.0, 9.0)}
    append_clients(path, 0, figures, 10_000)
    assert (path / "client_accuracy.jsonl").stat().st_size < 2000
    heat = events(tmp_path)["part-clients"]
    accuracy, loss = heat["views"]
    assert accuracy["rows"][:12] == ["0", "4321", "1", "2", "3", "4", "5", "6", "7", "8", "100", "200"]
    assert loss["rows"][:2] == ["4321", "0"]
    assert (accuracy["values"][1], loss["values"][0], loss["high"]) == ([0.0], [9.0], 9.0)
    assert len(accuracy["rows"]) == 30
    assert "Recorded: 100 of 10,000 clients, every 100th, and the worst of each round." in heat["note"]
    assert "Shown: the worst 30 of 109 by the last round." in heat["note"]


def test_a_client_that_was_not_recorded_in_a_round_has_a_gap_there(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=2)
    (path / "client_accuracy.jsonl").unlink()
    good = dict.fromkeys(range(1000), (0.5, 1.0))
    append_clients(path, 0, good, 1_000)
    append_clients(path, 1, good | {777: (0.1, 3.0)}, 1_000)
    accuracy, loss = events(tmp_path)["part-clients"]["views"]
    assert (accuracy["rows"][0], accuracy["values"][0]) == ("777", [None, 10.0])
    assert (loss["rows"][0], loss["values"][0]) == ("777", [None, 3.0])


def test_the_heat_map_of_a_run_of_an_earlier_version_has_no_loss(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=1)
    (path / "client_accuracy.jsonl").write_text('{"round":0,"step":2,"values":[0.5,null]}\n')
    heat = events(tmp_path)["part-clients"]
    assert [(view["name"], view["rows"], view["values"]) for view in heat["views"]] == [("accuracy", ["0"], [[50.0]])]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", rounds=1)
    (path / "client_accuracy.jsonl").unlink()
    append_clients(path, 0, {0: (0.5, float("inf")), 1: (0.25, 2.0)}, 2)
    assert [view["rows"] for view in events(tmp_path)["part-clients"]["views"]] == [["1", "0"], ["1"]]


# runs together


def test_other_methods_with_the_same_settings_are_drawn_over_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    make_run(tmp_path / "b", rounds=2, seed=1)
    make_run(tmp_path / "c", rounds=2, method={"name": "fedprox", "mu": 0.5})
    make_run(tmp_path / "d", rounds=2, split="iid:clients=3")
    make_run(tmp_path / "e", rounds=2, split="iid:clients=3", method={"name": "scaffold"})
    folder = Folder(tmp_path)
    one = next(row.id for row in folder.look() if row.name == "a")
    names = [series["name"] for series in events(folder, one)["part-curves"]["views"][0]["series"]]
    assert names == ["this run", "fedavg, other seeds", "fedprox:mu=0.5"]


def test_a_real_run_shows_its_split_its_clients_and_who_was_lost(tmp_path: Path) -> None:
    faulty = replace(QUICK, trouble=replace(QUICK.trouble, fault="straggle:client=1,round=1"))
    list(Run(faulty, out=tmp_path / "one"))
    found = events(tmp_path)
    assert found["run"]["row"]["state"] == "finished"
    assert sum(n for _, _, n in found["part-split"]["points"]) > 1000
    assert found["part-clients"]["columns"] == ["1", "2", "3"]
    assert found["part-lost"]["rows"] == [["2", "1", "answered too late"]]
    assert [row[:2] for row in found["part-costs"]["rows"]] == [["this run", "3"]]


def test_a_served_run_shows_its_sites_and_what_was_refused(tmp_path: Path) -> None:
    from sites import served

    run, played = served(replace(QUICK, split="iid:clients=3"), tmp_path)
    rounds = iter(run)
    played.told.put(({"event": "note", "text": "refused 10.0.0.9: <b>its clock</b>"}, b""))
    next(rounds)
    next(rounds)
    part = events(tmp_path / "run")["part-sites"]
    assert [row[:2] for row in part["rows"]] == [["north", "online"], ["south", "online"], ["west", "online"]]
    assert all(row[2].startswith("20") for row in part["rows"])
    assert "<b>its clock</b>" in part["list"][0]
    assert len(events(tmp_path / "run")["part-clients"]["columns"]) == 1  # the first round's came with the second
    list(rounds)
    over = events(tmp_path / "run")
    assert [row[1] for row in over["part-sites"]["rows"]] == ["offline"] * 3
    assert over["part-clients"]["columns"] == ["1", "2", "3"]


# what must not be read or run


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside", rounds=1, data="a secret")
    runs = tmp_path / "runs"
    inside = make_run(runs / "linked-files")
    for name in ("settings.toml", "records.jsonl", "client_accuracy.jsonl"):
        (inside / name).unlink(missing_ok=True)
        (inside / name).symlink_to(outside / name)
    (runs / "linked-folder").symlink_to(outside)
    (runs / "fifo").mkdir()
    os.mkfifo(runs / "fifo" / "settings.toml")  # opening it would wait for ever
    found, _ = snapshot(Folder(runs), "")
    assert "a secret" not in json.dumps(found)
    assert {row["name"] for row in json.loads(found["list"])["runs"]} == {"linked-files", "fifo"}
    assert all(row["round"] == 0 for row in json.loads(found["list"])["runs"])


@pytest.mark.parametrize("id", ["../outside", "%2e%2e/outside", "/etc", "..", "no such run"])
def test_a_path_instead_of_an_id_finds_nothing_outside(tmp_path: Path, id: str) -> None:
    make_run(tmp_path / "outside", data="a secret")
    make_run(tmp_path / "runs" / "one")
    found, _ = snapshot(Folder(tmp_path / "runs"), id)
    assert "a secret" not in json.dumps(found)


def test_code_that_settings_name_is_not_run(tmp_path: Path) -> None:
    code = tmp_path / "bad.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Bad: pass\n")
    make_run(tmp_path / "runs" / "one", rounds=1, method={"name": f"{code}:Bad"})
    assert "bad.py:Bad" in events(tmp_path / "runs")["run"]["row"]["method"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.toml", b"\xff\x00 not toml"),
        ("settings.toml", b'rounds = "many"\nmethod = 3\ndata = {a = 1}\n'),
        ("settings.toml", b"rounds = 1000000000000\n"),
        ("records.jsonl", b"nonsense\n" * 3),
        ("records.jsonl", b"[" * 100_000 + b"\n"),
        ("result.json", b"{"),
        ("model.json", b'{"labels": 3}'),
        ("split.json", b'{"clients": 1000000000000, "step": 0, "classes": -1, "points": [[0, 0, 1]]}'),
        (
            "client_accuracy.jsonl",
            b'{"round": -5, "step": 0, "values": []}\n{"round": 0, "step": 1, "values": [null]}\n',
        ),
        ("status.json", b"[]"),
    ],
)
def test_broken_files_break_neither_the_list_nor_the_page(tmp_path: Path, name: str, text: bytes) -> None:
    path = make_run(tmp_path / "one", rounds=2)
    (path / name).write_bytes(text)
    make_run(tmp_path / "two", rounds=1)
    assert len(events(tmp_path)["list"]["runs"]) == 2
    for row in Folder(tmp_path).look():
        events(tmp_path, row.id)


def test_folders_inside_a_run_are_not_searched(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    make_run(path / "clients" / "other")
    assert list(run_folders(tmp_path)) == [(str(path), Watched)]


def test_a_method_is_described_with_its_own_settings_and_stages() -> None:
    assert described({"method": {"name": "fedprox", "mu": 0.5}, "rounds": 3}) == ("fedprox:mu=0.5", 3)
    assert described({"method": {"name": "mine"}, "rounds": 3}) == ("mine", 3)
    assert described({"method": {"name": "ccvr"}, "rounds": 3})[1] > 3  # calibrates after the last round


def test_a_folder_that_does_not_exist_is_a_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Folder(tmp_path / "nowhere")
