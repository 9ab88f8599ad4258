"""A run that was killed goes on to the result of one that was not."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedskew.core.method import Method, Update
from fedskew.core.settings import UsageError
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.experiment.config import Evaluation, Experiment
from fedskew.experiment.extension import data_mark
from fedskew.experiment.run import Run, resume
from fedskew.experiment.run_writer import RunWriter
from fedskew.methods.ccvr import CCVR
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedcd import FedCD
from fedskew.methods.fedper import FedPer
from fedskew.methods.fedproc import FedProc
from fedskew.methods.scaffold import SCAFFOLD
from helpers.processes import command, quick_context


@dataclasses.dataclass(frozen=True)
class Keeper(Method):
    """A method whose clients' states matter: each adds what it kept to what it sends."""

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, _ = super().client(site, broadcast, {})
        own = update.payload["parameters"]
        kept = state.get("kept", own.zeros())
        mixed = {"parameters": own * 0.9 + kept * 0.1, "buffers": update.payload["buffers"]}
        return dataclasses.replace(update, payload=mixed), {"kept": own}


EXPERIMENT = Experiment(
    method=Keeper(),
    split="dirichlet:alpha=0.5,clients=6",
    model="mlp",
    rounds=6,
    clients_per_round=3,
    training=Training(batch_size=32),
    evaluation=Evaluation(every=2),
    seed=3,
)


def whole() -> str:
    run = Run(EXPERIMENT)
    list(run)
    return str(run.result.digest)


def started(path: Path, count: int, **options: object) -> None:
    """A run that is left after `count` rounds without a word, as if killed."""
    run = Run(EXPERIMENT, out=path, checkpoint_every=1, **options)  # type: ignore[arg-type]
    rounds = iter(run)
    for _ in range(count):
        next(rounds)
    assert run.directory is not None
    run.directory.close()


def again(path: Path, **options: object) -> Run:
    run = Run(EXPERIMENT, out=path, resume=True, **options)  # type: ignore[arg-type]
    list(run)
    return run


def test_a_resumed_run_ends_with_the_same_digest_and_whole_records(tmp_path: Path) -> None:
    started(tmp_path / "run", 3)
    run = again(tmp_path / "run")
    assert run.result.digest == whole()
    rounds = [json.loads(line)["round"] for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert rounds == [0, 1, 2, 3, 4, 5]
    assert run.notes == []


def test_what_was_written_after_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    started(tmp_path / "run", 3)
    for name in ("records.jsonl", "clients.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"torn')
    assert again(tmp_path / "run").result.digest == whole()


def spoil_state(path: Path) -> None:
    """Change one byte of a state of the last round."""
    last = json.loads((path / "clients.jsonl").read_text().splitlines()[-1])
    segment, offset, _ = last["place"]
    file = path / "clients" / f"{segment:06d}.segment"
    blob = bytearray(file.read_bytes())
    blob[offset] ^= 1
    file.write_bytes(blob)


@pytest.mark.parametrize("harm", ["cut", "changed", "state"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    started(tmp_path / "run", 4)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    if harm == "cut":
        newest.write_bytes(newest.read_bytes()[:-100])
    elif harm == "changed":
        blob = bytearray(newest.read_bytes())
        blob[-1] ^= 1
        newest.write_bytes(blob)
    else:
        spoil_state(tmp_path / "run")
    run = again(tmp_path / "run")
    assert len(run.notes) == 1
    assert "checkpoint 000003" in run.notes[0]
    assert run.result.digest == whole()


def test_states_of_the_checkpoint_before_are_kept_even_if_each_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that nobody needs is removed. With one state in each, those of the older checkpoint must stay."""
    monkeypatch.setattr("fedskew.federation.segments.Segments.__init__.__defaults__", (1,))
    started(tmp_path / "run", 4)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    run = again(tmp_path / "run")
    assert [note[:17] for note in run.notes] == ["checkpoint 000003"]
    assert run.result.digest == whole()


def test_a_checkpoint_that_cannot_be_used_is_removed_when_an_older_one_is(tmp_path: Path) -> None:
    started(tmp_path / "run", 4)
    spoil_state(tmp_path / "run")
    directory = RunWriter(tmp_path / "run")
    start, troubles = directory.restore(EXPERIMENT)
    directory.close()
    assert start is not None
    assert (start[0], len(troubles)) == (3, 1)
    assert [path.name[:6] for path in directory.checkpoints()] == ["000002"]


def test_other_versions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(tmp_path / "run", 2)
    monkeypatch.setattr("fedskew.experiment.run_writer.versions", lambda: {"torch": "9.9"})
    run = Run(EXPERIMENT, out=tmp_path / "run", resume=True)
    assert len(run.notes) == 1
    assert f"torch {torch.__version__}" in run.notes[0]


def test_with_every_checkpoint_gone_the_run_starts_over_and_says_so(tmp_path: Path) -> None:
    started(tmp_path / "run", 3)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    run = again(tmp_path / "run")
    assert len(run.notes) == 2
    assert run.result.digest == whole()


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = Run(EXPERIMENT, out=tmp_path / "run")
    list(first)
    run = Run(EXPERIMENT, out=tmp_path / "run", resume=True)
    assert list(run) == []
    assert run.result.digest == first.result.digest
    assert run.result.clients == first.result.clients


def test_a_directory_in_use_or_with_a_run_in_it_is_refused(tmp_path: Path) -> None:
    run = Run(EXPERIMENT, out=tmp_path / "run")
    with pytest.raises(UsageError, match="in use"):
        Run(EXPERIMENT, out=tmp_path / "run", resume=True)
    list(run)
    with pytest.raises(UsageError, match="already holds a run"):
        Run(EXPERIMENT, out=tmp_path / "run")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        resume(tmp_path)


def test_an_interrupt_keeps_what_was_finished(tmp_path: Path) -> None:
    run = Run(EXPERIMENT, out=tmp_path / "run", checkpoint_every=100)
    for record in run:
        if record.round == 2:
            break
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert again(tmp_path / "run").result.digest == whole()


def test_old_versions_of_states_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 30 kB hold one or two states; of 36 versions at most 12 are needed."""
    monkeypatch.setattr("fedskew.federation.segments.Segments.__init__.__defaults__", (30_000,))
    list(Run(dataclasses.replace(EXPERIMENT, rounds=12), out=tmp_path / "run", checkpoint_every=1))
    sizes = [p.stat().st_size for p in (tmp_path / "run" / "clients").iterdir()]
    states = [json.loads(line)["place"][2] for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert len(sizes) > 1
    assert sum(sizes) < 26 * max(states) < sum(states)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


KILLS = 20


@pytest.mark.slow  # twenty-odd processes, some with workers
def test_twenty_random_kills_do_not_change_the_result(tmp_path: Path, fedskew: Callable[..., Any]) -> None:
    """kill -9 at random moments, with any number of workers, until the run is done."""
    draw, context = random.Random(0), quick_context()
    options = ["--method", "scaffold", "--rounds", "40", "--seed", "5"]
    options += ["--split", "dirichlet:alpha=0.3,clients=20,min=5", "--clients-per-round", "8"]
    out, log, kills = tmp_path / "run", tmp_path / "log", 0
    while kills < KILLS:
        words = ["--resume", str(out)] if (out / "settings.toml").exists() else [*options, "--out", str(out)]
        words += ["--workers", str(draw.choice([1, 1, 1, 2]))]
        process = context.Process(target=command, args=(["run", *words], str(log)))
        process.start()
        waited = wait_for_rounds(process, out, draw.randint(0, 2))
        time.sleep(draw.random() * 0.05)
        if not process.is_alive():
            assert process.exitcode == 0, log.read_text()
            break
        process.kill()
        process.join()
        kills += 1
        assert waited
    final = fedskew("run", "--resume", str(out), "--workers", "1", "--json")
    unbroken = fedskew("run", *options, "--out", "whole", "--workers", "1", "--json")
    assert final.json()["digest"] == unbroken.json()["digest"]
    assert kills == KILLS


def wait_for_rounds(process: multiprocessing.process.BaseProcess, out: Path, more: int) -> bool:
    """Until the process has written `more` further records, or ended."""
    records = out / "records.jsonl"

    def count() -> int:
        return records.read_bytes().count(b"\n") if records.exists() else 0

    first, deadline = count(), time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive() and count() < first + more:
        time.sleep(0.005)
    return time.monotonic() < deadline


# Settings that changed, and more rounds.


def edited(path: Path, old: str, new: str) -> None:
    text = (path / "settings.toml").read_text()
    assert old in text
    (path / "settings.toml").write_text(text.replace(old, new))


PLAIN = dataclasses.replace(EXPERIMENT, method=FedAvg(), rounds=3)


def stopped(path: Path, experiment: Experiment = PLAIN, count: int = 2) -> None:
    """A run of a method in the registry that is left after `count` rounds."""
    run = Run(experiment, out=path, checkpoint_every=1)
    for _ in zip(range(count), run, strict=False):
        pass
    assert run.directory is not None
    run.directory.close()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("lr = 0.1", "lr = 0.2", "training.lr was 0.1 and is 0.2"),
        ("seed = 3", "seed = 4", "seed was 3 and is 4"),
        ("batch_size = 32", "batch_size = 32\nclip = 1.0", "training.clip was None and is 1.0"),
        ("clients_per_round = 3", 'clients_per_round = "all"', "clients_per_round was 3 and is all"),
    ],
)
def test_settings_edited_by_hand_are_refused_and_nothing_is_lost(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    stopped(tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "settings.toml"}
    edited(tmp_path / "run", old, new)
    with pytest.raises(UsageError, match=sentence):
        resume(tmp_path / "run")
    after = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "settings.toml"}
    assert after == before
    edited(tmp_path / "run", new, old)
    assert len(list(resume(tmp_path / "run"))) == 1


def test_other_settings_given_in_python_are_refused_too(tmp_path: Path) -> None:
    started(tmp_path / "run", 2)
    with pytest.raises(UsageError, match="seed was 3 and is 9"):
        Run(dataclasses.replace(EXPERIMENT, seed=9), out=tmp_path / "run", resume=True)


def patients(path: Path, *, shift: int = 0, rows: int = 40) -> Experiment:
    """An experiment on a table, which is written."""
    lines = [f"{i * 7 % 11 + (shift if i == 33 else 0)},{'ab'[i % 2]}" for i in range(rows)]
    path.write_text("\n".join(["x,label", *lines]))
    return Experiment(data=str(path), split="iid:clients=2", model="mlp:hidden=4", rounds=3)


@pytest.mark.parametrize("change", [{"shift": 1}, {"rows": 30}])
def test_data_that_changed_since_the_run_began_are_refused_and_nothing_is_lost(
    tmp_path: Path, change: dict[str, int]
) -> None:
    """One cell, or the number of rows: the rounds so far were of other samples."""
    run = Run(patients(tmp_path / "t.csv"), out=tmp_path / "run")
    next(iter(run))
    run.directory.close()  # type: ignore[union-attr]
    patients(tmp_path / "t.csv", **change)
    with pytest.raises(UsageError, match="the data were changed after the run began"):
        resume(tmp_path / "run")
    patients(tmp_path / "t.csv")
    assert len(list(resume(tmp_path / "run"))) == 2


def test_of_large_data_some_samples_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Run(patients(tmp_path / "t.csv")).assembled.world
    whole = data_mark(world)
    monkeypatch.setattr("fedskew.experiment.extension.WHOLE", 16)
    assert data_mark(world) != whole
    assert data_mark(world) == data_mark(Run(patients(tmp_path / "t.csv")).assembled.world)
    assert data_mark(world) != data_mark(Run(patients(tmp_path / "t.csv", rows=36)).assembled.world)


def test_own_code_that_changed_since_the_run_began_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from torch import nn\n\ndef net(shape, classes):\n    return nn.Sequential("
                               "nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))\n")  # fmt: skip
    run = Run(Experiment(split="iid:clients=2", model="mine.py:net", rounds=3), out="run")
    next(iter(run))
    run.directory.close()  # type: ignore[union-attr]
    again = resume("run")
    assert again.notes == []
    next(iter(again))
    again.directory.close()  # type: ignore[union-attr]
    with Path("mine.py").open("a") as file:
        file.write("# changed\n")
    assert resume("run").notes == ["mine.py changed after the run began: earlier rounds used another version"]


@pytest.mark.parametrize("name", ["result.json", "records.jsonl"])
def test_a_damaged_result_or_record_is_one_sentence(tmp_path: Path, name: str) -> None:
    list(Run(patients(tmp_path / "t.csv"), out=tmp_path / "run"))
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(UsageError, match=f"{name} cannot be used"):
        resume(tmp_path / "run")
    path.write_bytes(whole)
    assert resume(tmp_path / "run").result is not None


def test_a_comment_in_the_settings_changes_nothing(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    edited(tmp_path / "run", "seed = 3", "seed = 3  # as in the first trial")
    assert len(list(resume(tmp_path / "run"))) == 1


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), FedPer(), FedCD()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("done", [2, 3], ids=["stopped", "finished"])
def test_a_run_with_more_rounds_is_that_of_a_run_that_had_them_from_the_start(
    tmp_path: Path, method: Method, done: int
) -> None:
    experiment = dataclasses.replace(PLAIN, method=method)
    stopped(tmp_path / "run", experiment, done + 1)
    more = resume(tmp_path / "run", rounds=5)
    assert [record.round for record in more][-1] == 4
    whole = Run(dataclasses.replace(experiment, rounds=5), out=tmp_path / "whole")
    list(whole)
    assert more.result is not None
    assert whole.result is not None
    assert more.result.digest == whole.result.digest
    assert more.result.model_digest == whole.result.model_digest
    assert more.result.rounds == 5
    assert more.result.settings == whole.result.settings
    assert (tmp_path / "run" / "settings.toml").read_text() == (tmp_path / "whole" / "settings.toml").read_text()
    assert list(resume(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("changes", "rounds", "sentence"),
    [
        ({"training": Training(schedule="cosine")}, 6, "schedule 'cosine'"),
        ({"training": Training(schedule="steps:0.5=0.01")}, 9, "schedule 'steps:0.5=0.01'"),
        ({"method": FedProc()}, 6, "fedproc computes in a round depends on the number of rounds"),
        ({"method": FedCD(preset="paper")}, 6, "fedcd computes in a round depends"),
        ({"method": CCVR()}, 6, "the stage 'calibrate' of ccvr"),
        ({}, 2, "3 are finished"),
    ],
)
def test_more_rounds_are_refused_where_the_rounds_so_far_would_be_others(
    tmp_path: Path, changes: dict[str, Any], rounds: int, sentence: str
) -> None:
    stopped(tmp_path / "run", dataclasses.replace(PLAIN, **changes), 9)
    result = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(UsageError, match=sentence):
        resume(tmp_path / "run", rounds=rounds)
    assert (tmp_path / "run" / "result.json").read_bytes() == result
    assert list(resume(tmp_path / "run")) == []


def test_steps_in_the_future_do_not_prevent_more_rounds(tmp_path: Path) -> None:
    stopped(tmp_path / "run", dataclasses.replace(PLAIN, training=Training(schedule="steps:4=0.01")), 9)
    assert len(list(resume(tmp_path / "run", rounds=5))) == 2


def test_a_run_without_any_checkpoint_starts_again_with_the_rounds_asked_for(tmp_path: Path) -> None:
    stopped(tmp_path / "run", count=0)
    more = resume(tmp_path / "run", rounds=4)
    assert len(list(more)) == 4
    assert "rounds = 4" in (tmp_path / "run" / "settings.toml").read_text()


def test_more_rounds_on_the_command_line(tmp_path: Path, fedskew: Callable[..., Any]) -> None:
    options = ["--split", "iid:clients=2", "--model", "mlp:hidden=4", "--workers", "1", "--json"]
    fedskew("run", *options, "--rounds", "1", "--out", "run")
    more = fedskew("run", "--resume", "run", "--rounds", "2", "--workers", "1", "--json")
    assert more.code == 0, more.err
    assert more.json()["digest"] == fedskew("run", *options, "--rounds", "2", "--out", "whole").json()["digest"]
    wrong = fedskew("run", "--resume", "run", "--rounds", "2", "--seed", "1")
    assert (wrong.code, "cannot be combined" in wrong.err) == (2, True)
    assert fedskew("run", "--resume", "run", "--rounds", "many").code == 2
