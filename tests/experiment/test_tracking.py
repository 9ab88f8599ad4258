"""Trackers get the same records as the run's own file, and a run is the same with and without them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run, resume
from fedskew.experiment.tracking import TRACKERS, flat, scalars, trackers
from fedskew.studies.compare import run_methods
from helpers.records import a_record

SMALL = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=16", rounds=3)


def stopped_after(run: Run, rounds: int) -> None:
    steps = iter(run)
    for _ in range(rounds):
        next(steps)
    steps.close()  # type: ignore[attr-defined]


def test_a_record_becomes_named_numbers() -> None:
    costs = dict.fromkeys(("client_seconds", "server_seconds", "seconds"), 1.5)
    sent = {"bytes_up": {"parameters": 3, "buffers": 4}, "training": {"loss": 2.0}, "lost": {3: "why"}}
    record = a_record(0, 0.5, **sent, **costs)
    figures = scalars(record)
    assert figures.pop("global/accuracy") == 0.5
    assert figures.pop("global/loss") == 1.0
    assert figures.pop("training/loss") == 2.0
    assert figures.pop("cost/bytes_up") == 7
    assert figures.pop("cost/lost") == 1
    assert set(figures) == {f"cost/{key}" for key in ("bytes_down", "client_seconds", "server_seconds", "seconds")}
    assert "global/accuracy" not in scalars(msgspec.structs.replace(record, metrics=None))
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


def test_tensorboard_gets_every_round_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    stopped_after(Run(SMALL, out=tmp_path / "run", track=["tensorboard"]), 2)
    run = resume(tmp_path / "run", track=["tensorboard"])
    list(run)
    seen: dict[int, float] = {}
    purged: list[int] = []  # steps from which TensorBoard discards what an earlier attempt wrote
    for path in sorted((tmp_path / "run" / "tensorboard").iterdir()):
        blob = path.read_bytes()
        while blob:  # length (8), its checksum (4), event, checksum (4)
            size = int.from_bytes(blob[:8], "little")
            event = Event.FromString(blob[12 : 12 + size])
            if event.HasField("session_log"):
                purged.append(event.step)
            for value in event.summary.value:
                if value.tag == "global/accuracy":
                    seen[event.step] = value.simple_value
            blob = blob[12 + size + 4 :]
    wanted = {r.round + 1: r.metrics.global_.accuracy for r in run.records}
    assert seen == pytest.approx(wanted)
    assert list(wanted) == [1, 2, 3]
    assert purged == [3]


def test_mlflow_gets_every_round_into_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    stopped_after(Run(SMALL, out="run", track=["mlflow"]), 2)
    run = resume("run", track=["mlflow"])
    list(run)
    (kept,) = mlflow.search_runs(experiment_names=["fedskew"], output_format="list")
    assert kept.data.params["method/name"] == "fedavg"
    history = mlflow.tracking.MlflowClient().get_metric_history(kept.info.run_id, "global/accuracy")
    assert [m.step for m in history] == [1, 2, 3]


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    list(Run(SMALL, out=tmp_path / "run", track=["wandb"]))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


class Recorder(ModuleType):
    """A package that records its calls, in place of mlflow and wandb."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*values: Any, **more: Any) -> Any:
            self.calls.append((name, *values, more))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"), log=self.log, finish=self.finish)

        return call


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_mlflow_and_wandb_get_settings_rounds_and_the_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    stopped_after(Run(SMALL, out="run", track=[name]), 1)
    list(resume("run", track=[name]))
    names = {"mlflow": ("log_metrics", "end_run", "start_run"), "wandb": ("log", "finish", "init")}[name]
    logged = [call for call in recorder.calls if call[0] == names[0]]
    assert [call[-1]["step"] for call in logged] == [1, 2, 3]
    assert all("global/accuracy" in call[1] for call in logged)
    assert [call[0] for call in recorder.calls].count(names[1]) == 2  # closed when it stopped, and at the end
    first, second = (call[-1] for call in recorder.calls if call[0] == names[2])
    if name == "mlflow":
        assert (first["run_id"], second["run_id"]) == (None, "r1")
    else:
        assert first["id"] == second["id"]
        assert first["config"]["method"] == {"name": "fedavg", "weighting": "samples"}


def test_a_run_is_bit_identical_with_a_tracker(tmp_path: Path) -> None:
    plain, logged = Run(SMALL), Run(SMALL, out=tmp_path / "run", track=["tensorboard"])
    list(plain)
    list(logged)
    assert plain.result.digest == logged.result.digest


@pytest.mark.parametrize("when", ["begin", "record", "close"])
def test_a_tracker_that_fails_is_left_out_and_the_run_continues(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        rounds = 0

        def begin(self, *_: Any) -> None:
            self.act("begin")

        def record(self, *_: Any) -> None:
            Broken.rounds += 1
            self.act("record")

        def close(self) -> None:
            self.act("close")

        def act(self, now: str) -> None:
            if now == when:
                raise OSError("no route to host")

    monkeypatch.setitem(TRACKERS, "broken", Broken)
    run = Run(SMALL, track=["broken"])
    with caplog.at_level(logging.WARNING, logger="fedskew"):
        list(run)
    assert run.result.rounds == 3
    assert caplog.text.count("no route to host") == 1
    assert Broken.rounds == {"begin": 0, "record": 1, "close": 3}[when]


def test_a_comparison_logs_to_trackers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, int]] = []

    class Listener:
        def begin(self, folder: Path, settings: dict[str, Any], first: int) -> None:
            self.name = settings["method"]["name"]

        def record(self, figures: dict[str, float], step: int) -> None:
            steps.append((self.name, step))

        def close(self) -> None:
            steps.append((self.name, 0))

    monkeypatch.setitem(TRACKERS, "listener", Listener)
    run_methods(SMALL, ["fedavg", "fedprox"], [0], tmp_path, lambda *_: None, track=("listener",))
    assert steps == [(name, step) for name in ("fedavg", "fedprox") for step in (1, 2, 3, 0)]


def test_a_missing_package_is_an_error_that_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("tensorboard", "tensorboardX"), ("mlflow", "mlflow"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=rf"pip install 'fedskew\[{name}\]'"):
            trackers([name])
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        trackers(["wandbb"])


def test_without_a_directory_tensorboard_writes_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(Run(SMALL, track=["tensorboard"]))
    assert list(Path("runs/tensorboard").iterdir())
