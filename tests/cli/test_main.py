"""The command line: what it prints, its errors and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew import __version__
from helpers.processes import leftovers

FEW = ["--rounds", "2", "--workers", "1"]


def test_run_without_arguments_trains_on_digits_and_prints_the_result(fedskew: Any, tmp_path: Path) -> None:
    done = fedskew("run", "--workers", "1")
    assert done.code == 0, done.err
    for words in (
        "fedavg on digits",
        "10 clients",
        "round 30/30",
        "global model, balanced test set",
        "digest",
        "next:",
    ):
        assert words in done.out
    (run,) = (tmp_path / "runs").iterdir()
    for name in ("settings.toml", "records.jsonl", "server.safetensors", "model.safetensors", "result.json"):
        assert (run / name).exists()
    assert json.loads((run / "result.json").read_text())["accuracy"] > 0.8


def test_json_prints_one_object_and_everything_else_goes_to_stderr(fedskew: Any) -> None:
    done = fedskew("run", "--json", "--seed", "1", *FEW)
    result = done.json()
    assert len(done.out.strip().splitlines()) == 1
    assert {"digest", "model_digest", "accuracy", "metrics", "bytes_up", "bytes_down", "seconds"} <= result.keys()
    assert "round 2/2" in done.err
    again = fedskew("run", "--json", "--seed", "1", *FEW).json()
    other = fedskew("run", "--json", "--seed", "2", *FEW).json()
    assert result["digest"] == again["digest"] != other["digest"]


def test_a_run_that_a_method_is_not_meant_for_is_warned_in_one_line(
    fedskew: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert fedskew("run", "--method", "feddyn", "--set", "training.momentum=0.9", *FEW).code == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("FedDyn is meant for SGD without momentum (")
    caplog.clear()
    assert fedskew("run", "--method", "feddyn", *FEW).code == 0
    assert not caplog.records


@pytest.mark.slow
def test_the_warning_goes_to_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedskew", "run", "--method", "fedper", "--clients-per-round", "2", *FEW]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("FedPer is meant for all clients in every round (")


def test_the_metrics_have_every_key(fedskew: Any) -> None:
    metrics = fedskew("run", "--json", "--set", "holdout.newcomers=2", *FEW).json()["metrics"]
    detail = {"samples", "predicted", "balanced_accuracy", "macro_f1", "weighted_f1", "auroc", "auprc", "ece"}
    assert {"accuracy", "loss", "per_class"} | detail == metrics["global"].keys()
    for word, count in (("clients", 8), ("new", 2)):
        for kind in ("global", "personal"):
            figures = metrics[word][kind]
            over = {"mean", "weighted", "std", "worst_decile", "loss", "per_class", "clients", "over"}
            assert over | detail == figures.keys()
            assert figures["clients"] == count
    assert metrics["new"]["never_trained"] == 2


def test_two_methods_with_the_same_model_have_one_model_digest(fedskew: Any) -> None:
    a = fedskew("run", "--json", "--method", "fedavg", *FEW).json()
    b = fedskew("run", "--json", "--method", "fedprox", "--set", "method.mu=0", *FEW).json()
    c = fedskew("run", "--json", "--method", "fedprox", "--set", "method.mu=1", *FEW).json()
    assert a["model_digest"] == b["model_digest"] != c["model_digest"]


def test_a_run_can_be_repeated_from_the_settings_it_wrote(fedskew: Any, tmp_path: Path) -> None:
    first = fedskew(
        "run", "--json", "--method", "fedprox", "--set", "method.mu=0.5", "--set", "training.lr=0.05", "--seed", "4",
        "--clients-per-round", "0.5", "--out", "first", *FEW,
    )  # fmt: skip
    second = fedskew("run", "--json", "--config", "first/settings.toml", "--workers", "1")
    assert first.json()["digest"] == second.json()["digest"]
    assert first.json()["settings"] == second.json()["settings"]
    third = fedskew("run", "--json", "--config", "first/settings.toml", "--method", "fedavg", "--workers", "1")
    assert third.json()["settings"]["method"] == {"name": "fedavg", "weighting": "samples"}


def test_clients_per_round_reaches_the_run(fedskew: Any, tmp_path: Path) -> None:
    fedskew("run", "--json", "--clients-per-round", "3", "--out", "a", *FEW)
    records = [json.loads(line) for line in (tmp_path / "a" / "records.jsonl").read_text().splitlines()]
    assert [len(r["cohort"]) for r in records] == [3, 3]


def test_rounds_and_bytes_to_a_target_are_reported(fedskew: Any) -> None:
    done = fedskew("run", "--json", "--target", "2", *FEW).json()
    assert done["to_target"]["rounds"] == 1
    assert "not reached" in fedskew("run", "--target", "99.9", *FEW).out


def test_a_run_names_faults_and_continues(fedskew: Any) -> None:
    done = fedskew("run", "--fault", "nan:client=2,round=0+shape:client=3+raise:client=4,round=1", *FEW)
    assert done.code == 0
    assert "client 2 sent a value that is not finite" in done.out
    assert "client 3 sent parameters/" in done.out
    assert "client 4 failed: RuntimeError" in done.out


def test_a_lost_quorum_stops_the_run_with_its_state_saved(fedskew: Any) -> None:
    done = fedskew("run", "--quorum", "8", "--fault", "drop:rate=0.5,round=1", "--out", "run", *FEW)
    assert done.code == 3
    assert "8 are needed" in done.err
    assert "fedskew run --resume run" in done.err
    assert len(Path("run/records.jsonl").read_text().splitlines()) == 1
    assert list(Path("run/checkpoints").iterdir())


WILD = ("--set", "training.lr=1e5", *FEW)


@pytest.mark.parametrize("rate", ["1e5", "1e30"])  # a loss is not finite; no update is
def test_a_diverged_run_ends_with_the_reason_and_does_not_advise_to_resume(fedskew: Any, rate: str) -> None:
    done = fedskew("run", *FEW, "--set", f"training.lr={rate}")
    assert done.code == 3
    assert "the run diverged in round 1" in done.err
    assert "not finite" in done.err
    assert "smaller training.lr" in done.err
    assert "resume with" not in done.err


def test_a_run_may_go_on_with_a_warning(fedskew: Any) -> None:
    done = fedskew("run", "--on-divergence", "warn", *WILD)
    assert "warning: the run diverged in round 1" in done.out


def test_the_json_of_a_diverged_run_is_valid_and_says_so(fedskew: Any) -> None:
    done = fedskew("run", "--json", *WILD)
    assert done.code == 3
    assert "NaN" not in done.out
    assert json.loads(done.out)["diverged"].startswith("the run diverged in round")


def test_a_comparison_counts_a_diverged_run_as_failed(fedskew: Any) -> None:
    done = fedskew("compare", "fedavg", *WILD)
    assert done.code == 0
    assert "fedavg seed 0 failed: the run diverged in round" in done.out


def test_on_divergence_is_stop_or_warn(fedskew: Any) -> None:
    done = fedskew("run", "--on-divergence", "ignore", *FEW)
    assert done.code == 2
    assert "on_divergence" in done.err


def test_personal_models_are_printed_only_if_they_differ_from_the_global_model(fedskew: Any) -> None:
    """FedAvg deploys the global model everywhere; FedPer has no global model."""
    words = ("--split", "longtail:factor=10+iid:clients=5", "--set", "holdout.newcomers=1", *FEW)
    fedavg, fedper = (fedskew("run", "--method", name, *words).out for name in ("fedavg", "fedper"))
    for row in ("balanced test set", "tail classes (rarest third)", "clients' test parts: mean of 4 clients"):
        assert f"global model, {row}" in fedavg
    assert "global model, new clients' test parts: worst tenth of 1 clients" in fedavg
    assert "personal models" not in fedavg
    assert "personal models, clients' test parts: worst tenth of 4 clients" in fedper
    assert "global model" not in fedper


ERRORS = [
    (["run", "--method", "fedprxo"], "did you mean 'fedprox'?"),
    (["run", "--data", "digts"], "did you mean 'digits'?"),
    (["run", "--data", "cifar10"], "cifar10"),
    (["run", "--data", "nowhere/x.npz"], "nowhere/x.npz"),
    (["run", "--split", "dirichle:alpha=1"], "did you mean 'dirichlet'?"),
    (["run", "--split", "dirichlet:alpha=0"], "alpha"),
    (["run", "--split", "dirichlet:alpha=0.1,clients=10,min=400"], "400"),
    (["run", "--split", "dirichlet:beta=1"], "unknown setting"),
    (["run", "--split", "dirichlet:alpha"], "key=value"),
    (["run", "--model", "mpl"], "did you mean 'mlp'?"),
    (["run", "--model", "cnn4"], "16x16"),
    (["run", "--model", "mlp:hiden=3"], "did you mean 'hidden'?"),
    (["run", "--rounds", "0"], "rounds"),
    (["run", "--rounds", "many"], "rounds"),
    (["run", "--rounds", "99999999999999999999"], "expected a whole number of at least 1 and of at most 1000000"),
    (["run", "--set", "training.epochs=0"], "epochs=0 is invalid: expected a whole number of at least 1"),
    (["run", "--set", "training.steps=0"], "steps=0"),
    (["run", "--method", "fedprox:mu=-5"], "mu='-5' is invalid: expected a number of at least 0"),
    (["run", "--method", "fedprox:nu=1"], "did you mean 'mu'?"),
    (["run", "--method", "fedavg+fedprox"], "expected one method"),
    (["run", "--seed", "-1"], "seed"),
    (["run", "--clients-per-round", "11"], "there are 10 clients"),
    (["run", "--clients-per-round", "some"], "clients_per_round"),
    (["run", "--set", "training.lr=-1"], "lr=-1"),
    (["run", "--set", "training.lrr=1"], "did you mean 'lr'?"),
    (["run", "--set", "method.mu=1"], "method fedavg has no setting 'mu'; add --method with one that has it:"),
    (["run", "--set", "training"], "--set training is invalid: expected name=value"),
    (["run", "--resume", "x", "--seed", "1"], "cannot be combined with other settings"),
    (["run", "--set", "rounds.x=1"], "rounds"),
    (["run", "--set", "trainig.lr=1"], "did you mean 'training'?"),
    (["run", "--set", "training.augment=flp"], "did you mean 'flip'?"),
    (["run", "--config", "absent.toml"], "absent.toml"),
    (["run", "--config", "broken.toml"], "not valid TOML"),
    (["run", "--device", "tpu"], "device tpu is not available: expected auto, cpu"),
    (["run", "--workers", "0"], "at least 1"),
    (["run", "--workers", "two"], "workers='two' is invalid"),
    (["run", "--fault", "nann"], "did you mean 'nan'?"),
    (["run", "--fault", "nan:rate=2"], "rate"),
    (["run", "--quorum", "99"], "quorum"),
    (["run", "--resume", "absent"], "holds no run"),
    (["run", "--out", "file/inside"], "cannot be written"),
    (["run", "--data", "broken.npz"], "broken.npz"),
    (["run", "--metod", "fedavg"], "--method"),
    (["rn"], "run"),
    (["compare", "fedavg", "fedprxo"], "did you mean 'fedprox'?"),
    (["compare", "fedavg", "--seeds", "a"], "--seeds"),
    (["compare"], "Missing argument 'METHOD'"),
    (["split", "shard"], "did you mean 'shards'?"),
    (["split", "iid", "--seed", "x"], "--seed"),
    (["split", "iid", "--png", "absent/x.png"], "absent"),
]


@pytest.mark.parametrize(("words", "sentence"), ERRORS, ids=[" ".join(words)[:60] for words, _ in ERRORS])
def test_a_mistake_is_one_sentence_and_exit_code_two(fedskew: Any, words: list[str], sentence: str) -> None:
    Path("broken.toml").write_text("rounds = ")
    Path("broken.npz").write_bytes(b"PK not really")
    Path("file").touch()
    done = fedskew(*words)
    assert done.code == 2, done.err
    assert sentence in done.err
    assert done.err.startswith("fedskew: ")
    assert len(done.err.strip().splitlines()) == 1
    assert "Traceback" not in done.err


def test_help_and_version_need_no_torch() -> None:
    """`python -m fedskew` is the fedskew command."""
    code = "import runpy, sys; sys.argv = ['fedskew', '--version']; runpy.run_module('fedskew', run_name='__main__')"
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    done = subprocess.run([sys.executable, "-c", watch + code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"fedskew {__version__}", "False"]


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "compare",
        "table",
        "tune",
        "report",
        "split",
        "data",
        "methods",
        "models",
        "serve",
        "join",
        "certs",
        "watch",
        "status",
        "forget",
    ],
)
def test_help_explains_a_command_without_python_types(fedskew: Any, command: str) -> None:
    done = fedskew(command, "--help")
    assert done.code == 0
    assert f" {command} [OPTIONS]" in done.out
    assert not re.search(r"<(list|str|int|path|float)", done.out)


def test_without_a_command_the_commands_are_listed(fedskew: Any) -> None:
    for command in ("run ", "compare ", "split ", "serve "):
        assert command in fedskew("--help").out


def test_compare_prints_one_table_and_can_be_resumed(fedskew: Any, tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedper", "--rounds", "2", "--seeds", "0,1", "--workers", "1", "--out", "table"]
    done = fedskew(*words, "--target", "5")
    assert done.code == 0, done.err
    for word in ("fedavg seed 1 round 2/2", "rounds to target", "±", "fedper"):
        assert word in done.out
    again = fedskew(*words, "--json")
    assert [line["method"] for line in again.json()["methods"]] == ["fedavg", "fedper"]
    assert "round" not in again.err
    assert fedskew(*words[:3], "--rounds", "3", "--out", "table").code == 2


def test_split_prints_the_split_and_draws_it(fedskew: Any, tmp_path: Path) -> None:
    done = fedskew("split", "pcdd:clients=5,classes=2", "--png", "split.png")
    assert done.code == 0
    for words in ("client", "Gini coefficient of the sizes", "distance to the global mix", "drawn to split.png"):
        assert words in done.out
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    table = fedskew("split", "pcdd:clients=5,classes=2", "--json").json()
    assert [sum(row) for row in table["table"]] == table["sizes"]
    assert set(table["classes"]) == {2}


@pytest.mark.slow  # two rounds of every method, twice, for their costs
def test_every_listing_has_a_table_and_a_json_form(fedskew: Any) -> None:
    assert "fedprox" in fedskew("methods").out
    assert {row["name"] for row in fedskew("methods", "--json").json()["methods"]} >= {"fedavg", "fedprox"}
    assert "resnet18" in fedskew("models").out
    assert any(row["parameters"] == 1_663_370 for row in fedskew("models", "--json").json()["models"])
    assert "digits" in fedskew("data").out
    rows = {row["name"]: row for row in fedskew("data", "--json").json()["data"]}
    assert rows["digits"]["verified"] == "ok"
    assert rows["cifar10"]["verified"] == "missing"
    assert "dirichlet" in fedskew("split", "--list").out
    assert "pcdd" in fedskew("split", "--list", "--json").json()["partitioner"]


def test_a_user_s_own_vectors_can_be_trained_on(fedskew: Any) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    np.savez("own.npz", x_train=(rng.normal(size=(300, 5)) + y[:, None]).astype(np.float32), y_train=y)
    done = fedskew("run", "--json", "--data", "own.npz", "--split", "iid:clients=4", "--rounds", "5", "--workers", "1")
    assert done.code == 0, done.err
    assert done.json()["accuracy"] > 0.5


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_says_how_to_resume(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedskew", "run"]
    options = ["--rounds", "400", "--out", "run", "--workers", "2", "--split", "iid:clients=20"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    usual = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731  a shell's background ignores it
    process = subprocess.Popen([*command, *options], cwd=tmp_path, text=True, preexec_fn=usual, **pipes)
    records, deadline = tmp_path / "run" / "records.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and (not records.exists() or records.read_bytes().count(b"\n") < 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not leftovers(process.pid)
    assert err.strip().splitlines() == ["fedskew: stopped; resume with: fedskew run --resume run"]
    written = records.read_text().count("\n")
    resumed = subprocess.Popen([*command, "--resume", "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while time.monotonic() < deadline + 60 and records.read_text().count("\n") <= written:
        time.sleep(0.05)
    os.kill(resumed.pid, signal.SIGTERM)
    assert resumed.wait(60) == 130
    rounds = [json.loads(line)["round"] for line in records.read_text().splitlines()]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) > written
