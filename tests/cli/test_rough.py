"""What goes wrong on real machines: full disks, Ctrl-C at a bad moment, too many workers; and hints that are true."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.cli.options import default_out
from fedskew.core.files import write_atomically
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_writer import RunWriter
from helpers.processes import leftovers

FEW = ["--rounds", "3", "--workers", "1", "--split", "iid:clients=3"]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after(calls: int) -> Any:
    """A function that works so many times, then finds the disk full."""
    done = [0]

    def call(*_: object) -> None:
        done[0] += 1
        if done[0] > calls:
            raise FULL

    return call


@pytest.mark.parametrize("calls", [0, 1, 2, 4])
def test_a_full_disk_is_one_sentence_and_the_run_can_be_resumed(
    fedskew: Any, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The first file that is synced is settings.toml, the next ones are checkpoints, then the final files."""
    whole = fedskew("run", "--json", *FEW).json()["digest"]
    with monkeypatch.context() as patch:
        patch.setattr("fedskew.core.files.os.fsync", full_after(calls))
        done = fedskew("run", "--out", "a run", "--checkpoint-every", "1", *FEW)
    assert done.code == 4
    (line,) = done.err.strip().splitlines()
    assert "the disk is full: No space left on device" in line
    assert not list(Path("a run").rglob("*.part"))
    if calls:
        assert line.endswith("resume with: fedskew run --resume 'a run'")
        assert fedskew("run", "--json", "--resume", "a run", "--workers", "1").json()["digest"] == whole


def test_a_record_cut_off_by_a_full_disk_does_not_harm_the_run(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fedskew("run", "--json", *FEW).json()["digest"]

    usual = Path.open

    def torn(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        """The disk is full in the middle of the second record."""
        file = usual(self, mode, *more, **options)
        if self.name == "records.jsonl" and mode == "ab" and self.stat().st_size:
            file.write(b'{"number": 2, "ro')
            file.flush()
            raise FULL
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", torn)
        patch.setattr(RunWriter, "_truncate", staticmethod(os.truncate))
        assert fedskew("run", "--out", "run", "--checkpoint-every", "1", *FEW).code == 4
    assert fedskew("run", "--json", "--resume", "run", "--workers", "1").json()["digest"] == whole
    numbers = [json.loads(line)["number"] for line in Path("run/records.jsonl").read_text().splitlines()]
    assert numbers == [1, 2, 3]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr("fedskew.core.files.os.fsync", full_after(0))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_place_that_cannot_be_written_is_one_sentence(fedskew: Any) -> None:
    Path("file").write_text("")
    said = fedskew("embed", "--data", "digits", "--model", "linear", "--out", "file/features.npz")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "file/features.npz.part cannot be used: Not a directory." in said.err


def test_a_report_on_a_full_disk_leaves_nothing_behind(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fedskew("run", "--out", "run", *FEW).code == 0
    monkeypatch.setattr("fedskew.core.files.os.fsync", full_after(0))
    done = fedskew("report", "run", "--no-drift", "--out", "page.html")
    assert done.code == 2
    assert "page.html cannot be written: No space left on device" in done.err
    assert not list(Path().glob("page.html*"))


def test_the_next_commands_use_the_same_clients_and_options(fedskew: Any) -> None:
    """They are run as printed: the split has this run's clients, the other method this run's settings."""
    options = ["--seed", "3", "--set", "training.lr=0.05", "--split", "dirichlet:alpha=0.5,clients=4", "--rounds", "2"]
    first = fedskew("run", "--out", "my runs/one", "--workers", "1", *options)
    sizes = [len(part) for part in _training_parts(Path("my runs/one"))]
    lines = [line.removeprefix("next:").strip() for line in first.out.splitlines()[-2:]]
    split, run = (shlex.split(line.partition("    ")[0])[1:] for line in lines)
    assert fedskew(*split, "--json").json()["sizes"] == sizes
    assert Path("split.png").exists()
    settings = fedskew(*run, "--json", "--workers", "1").json()["settings"]
    assert settings["method"]["name"] == "fedprox"
    assert (settings["seed"], settings["training"]["lr"], settings["rounds"]) == (3, 0.05, 2)
    again = fedskew("run", "--method", "fedprox", "--workers", "1", *options)
    assert "--method fedavg" in again.out


def _training_parts(path: Path) -> Any:
    from fedskew.experiment.assemble import assemble
    from fedskew.experiment.run_directory import read_run

    return assemble(read_run(path).experiment).partition.clients


def test_a_method_may_be_given_with_its_settings(fedskew: Any) -> None:
    text = fedskew("run", "--json", "--method", "fedprox:mu=0.5", *FEW).json()
    table = fedskew("run", "--json", "--method", "fedprox", "--set", "method.mu=0.5", *FEW).json()
    assert text["settings"] == table["settings"]
    assert text["digest"] == table["digest"]
    both = fedskew("run", "--json", "--method", "fedprox:mu=0.5", "--set", "method.mu=0.1", *FEW).json()
    assert both["settings"]["method"]["mu"] == 0.1
    Path("own.toml").write_text('method = "fedprox:mu=0.5"\nrounds = 3\nsplit = "iid:clients=3"\n')
    assert fedskew("run", "--json", "--config", "own.toml", "--workers", "1").json()["digest"] == text["digest"]
    Path("own.toml").write_text('rounds = 3\nsplit = "iid:clients=3"\n[method]\nname = "fedprox"\nmu = 0.7\n')
    kept = fedskew("run", "--json", "--config", "own.toml", "--method", "fedprox", "--workers", "1").json()
    assert kept["settings"]["method"]["mu"] == 0.7


def test_the_second_example_of_the_readme_is_accepted(fedskew: Any) -> None:
    words = "run --method fedprox --set method.mu=0.1 --set training.lr=0.05 --seed 3 --out runs/mine"
    settings = fedskew(*words.split(), "--json", *FEW).json()["settings"]
    assert (settings["method"]["mu"], settings["training"]["lr"], settings["seed"]) == (0.1, 0.05, 3)


def test_more_workers_than_cores_are_capped_and_a_line_says_so(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.experiment.machine.cores", lambda: 1)
    done = fedskew("run", "--json", "--workers", "100", "--rounds", "1")
    assert done.code == 0
    assert "note: 100 workers are more than the 1 cores of this machine: 1 are used" in done.err


def test_progress_says_which_accuracy_and_which_loss(fedskew: Any) -> None:
    out = fedskew("run", *FEW).out
    (line,) = [line for line in out.splitlines() if line.startswith("round 3/3")]
    assert " test accuracy " in line
    assert " %, training loss " in line


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"x_tets": np.zeros((3, 4), np.float32)}, "it has x_tets, expected only x_train, y_train, x_test"),
        ({"labels": np.array(["a", "b"])}, "it has labels"),
        ({"x_train": np.zeros((30, 8, 8), np.uint16)}, "x_train is uint16, expected images as uint8 (0 to 255)"),
        ({"x_train": np.zeros((30, 8, 8, 3), np.int32)}, "x_train is int32"),
    ],
)
def test_arrays_of_an_npz_that_would_be_misread_are_refused(fedskew: Any, extra: dict[str, Any], sentence: str) -> None:
    arrays = {"x_train": np.zeros((30, 4), np.float32), "y_train": np.arange(30) % 3}
    np.savez("own.npz", **arrays | extra)
    done = fedskew("run", "--data", "own.npz", "--rounds", "1")
    assert done.code == 2
    assert sentence in done.err


def test_integers_and_half_floats_in_a_table_are_taken_as_numbers(fedskew: Any) -> None:
    for kind in (np.int64, np.uint16, np.float16):
        np.savez("own.npz", x_train=(np.arange(120).reshape(30, 4) % 7).astype(kind), y_train=np.arange(30) % 3)
        assert fedskew("run", "--data", "own.npz", "--workers", "1", "--rounds", "1", "--split", "iid").code == 0


def test_certs_and_report_print_json(fedskew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [Path("keys") / name for name in ("server", "a", "b")]
    monkeypatch.setattr("fedskew.deploy.certs.make_certs", lambda *_: folders)  # it needs Flower
    made = fedskew("certs", "--sites", "a,b", "--out", "keys", "--json").json()
    assert made == {
        "server": "keys/server",
        "sites": {"a": "keys/a", "b": "keys/b"},
        "authority": "keys/ca.key",
        "days": 365,
    }
    assert fedskew("run", "--out", "run", *FEW).code == 0
    done = fedskew("report", "run", "--no-drift", "--json")
    assert done.json() == {"runs": 1, "file": "report.html", "bytes": Path("report.html").stat().st_size}
    assert "reading 1 runs" in done.err


@pytest.mark.parametrize("command", ["run", "compare", "tune", "table", "report", "split", "serve", "join", "certs"])
def test_every_command_takes_json(fedskew: Any, command: str) -> None:
    assert "--json" in fedskew(command, "--help").out


@pytest.mark.slow  # starts processes
def test_ctrl_c_while_workers_start_prints_one_line(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to every process of its group, so also to workers that are still importing torch."""
    command = [sys.executable, "-m", "fedskew", "run", "--workers", "2", "--rounds", "400", "--out", "run"]
    usual = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = (
        "import fedskew.experiment.machine as m; m.cores = lambda: 2; import sys; from fedskew.cli.main import main; "
    )
    command = [sys.executable, "-c", workers + "main(sys.argv[1:])", *command[3:]]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, preexec_fn=usual, start_new_session=True, **pipes)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not _children(process.pid):
        time.sleep(0.01)
    time.sleep(0.3)  # they import
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines() == ["fedskew: stopped; resume with: fedskew run --resume run"]
    assert not leftovers(process.pid)


def _children(pid: int) -> list[str]:
    """The worker processes of a process (not the one that watches shared resources)."""
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = (task / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(pid) and b"spawn_main" in (task / "cmdline").read_bytes():
                found.append(task.name)
        except OSError:
            continue
    return found


def test_runs_begun_in_one_second_have_directories_of_their_own() -> None:
    experiment = Experiment("fedavg", data="digits")
    assert len({default_out(experiment) for _ in range(20)}) == 20


def test_a_stop_without_patience_names_the_form_that_was_meant(fedskew: Any) -> None:
    for text in ("3", "figure=f1"):
        said = fedskew("run", "--stop", text)
        assert said.code == 2
        assert f"--stop {text} is invalid: expected patience=10" in " ".join(said.err.split())
