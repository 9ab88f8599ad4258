"""Run directories written by earlier versions are still read; what is written now comes back as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.evaluation.figures import FIGURES, headline
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run, resume
from fedskew.experiment.run_directory import find_runs, is_finished, is_run, read_run
from fedskew.federation.protocol import Record, merge_late

SAVED = Path(__file__).parent / "saved-runs"  # written before records and results had a schema number


def test_a_run_of_the_first_format_is_read() -> None:
    """The figures are those its files hold as text."""
    saved = read_run(SAVED / "simulated")
    assert saved.experiment.method_name == "scaffold"
    assert [record.round for record in saved.records] == [0, 1]
    lines = [json.loads(line) for line in (SAVED / "simulated" / "records.jsonl").read_text().splitlines()]
    last = saved.records[-1]
    assert last.metrics is not None
    assert last.metrics.global_ is not None
    assert last.metrics.global_.accuracy == lines[-1]["metrics"]["global"]["accuracy"]
    assert last.metrics.global_.tail == lines[-1]["metrics"]["global"]["tail"]
    assert last.metrics.new is not None
    assert last.metrics.new.personal.mean == lines[-1]["metrics"]["new"]["personal"]["mean"]
    assert saved.result is not None
    assert saved.result.digest.startswith("b00ab3b3")
    assert saved.result.diagnostics is not None
    assert saved.result.diagnostics.clients == 2
    assert saved.server()["parameters"].keys() == saved.server()["control"].keys()
    assert 0 in saved.store()


def test_a_served_run_of_the_first_format_gets_its_late_client_figures() -> None:
    saved = read_run(SAVED / "served")
    assert saved.result is not None
    assert len(saved.result.sites) == 3
    assert all(record.metrics is not None and record.metrics.clients is not None for record in saved.records)
    assert all(record.before is None for record in saved.records)


def test_a_run_of_the_first_format_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    path = shutil.copytree(SAVED / "simulated", tmp_path / "run")
    for name in ("result.json", "server.safetensors", "model.safetensors"):
        (path / name).unlink()
    max((path / "checkpoints").iterdir()).unlink()
    run = resume(path)
    assert [record.round for record in run] == [1]
    assert run.result is not None
    assert run.result.rounds == 2


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    experiment = Experiment(split="iid:clients=2", model="mlp:hidden=4", rounds=2, training=Training(batch_size=64))
    run = Run(experiment, out=tmp_path / "run")
    assert is_run(tmp_path / "run")
    assert not is_finished(tmp_path / "run")
    records = [msgspec.structs.replace(record, server=None) for record in run]
    assert is_finished(tmp_path / "run")
    saved = read_run(tmp_path / "run")
    assert saved.records == records == run.records
    assert saved.result == run.result
    assert saved.experiment == experiment


def test_a_record_cut_off_while_it_was_written_is_left_out(tmp_path: Path) -> None:
    path = shutil.copytree(SAVED / "simulated", tmp_path / "run")
    with (path / "records.jsonl").open("a") as file:
        file.write('{"round": 2, "st')
    assert len(read_run(path).records) == 2


@pytest.mark.parametrize("name", ["records.jsonl", "result.json"])
def test_a_damaged_file_gives_one_sentence(tmp_path: Path, name: str) -> None:
    path = shutil.copytree(SAVED / "simulated", tmp_path / "run")
    (path / name).write_text('{"round": "many"}\n')
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(path)


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    shutil.copytree(SAVED, tmp_path / "a" / "b")
    assert len(find_runs([tmp_path, tmp_path / "a"])) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no run"):
        find_runs([tmp_path / "empty"])


def test_late_figures_go_to_the_round_before_and_only_where_it_was_evaluated() -> None:
    first, second = read_run(SAVED / "simulated").records
    late = Record(**{**{f: getattr(second, f) for f in Record.__struct_fields__}, "before": second.metrics})
    merged = merge_late([first, late])
    assert merged[0].metrics is not None
    assert second.metrics is not None
    assert merged[0].metrics.clients == second.metrics.clients
    assert first.metrics is not None
    assert merged[0].metrics.global_ == first.metrics.global_
    unevaluated = msgspec.structs.replace(first, metrics=None)
    assert merge_late([unevaluated, late])[0].metrics is None


def test_a_run_of_the_first_format_has_no_figures_that_need_counts_and_is_not_called_balanced() -> None:
    result = read_run(SAVED / "simulated").result
    assert result is not None
    assert result.metrics is not None
    assert result.metrics.global_ is not None
    assert result.metrics.global_.balanced is None
    assert FIGURES["f1"].read(result) is None
    assert FIGURES["global"].name(result.metrics) == "global model, test set"
    assert result.headline == ""
    assert headline(result.metrics) == result.accuracy
