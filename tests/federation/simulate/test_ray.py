"""Clients on Ray: the bits of one process, also when an actor dies; one sentence where there is no Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.cli.main import main
from fedskew.core.files import sha256
from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.loop import run
from fedskew.federation.simulate.jobs import Job, Trained
from fedskew.federation.simulate.ray import Actors, import_ray
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.scaffold import SCAFFOLD
from toys import digits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray that the caller began: ours to use, not ours to end."""
    there = import_ray()
    there.init("local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield there
    assert there.is_initialized()
    there.shutdown()


def test_the_bits_of_one_process_with_the_clients_own_state(ray: Any) -> None:
    outcomes = []
    for engine in ("processes", "ray"):
        world = digits(SCAFFOLD())
        with Simulation(world, workers=1 if engine == "processes" else 2, engine=engine) as simulation:
            *_, last = run(world.method, simulation, world.server_site, 2, lambda round: [0, 1, 2, 3, 4])
            kept = [sha256(simulation.store.get(client)) for client in range(5)]
        outcomes.append((digest(last.server), last.metrics, kept))
    assert outcomes[0] == outcomes[1]


def test_a_round_that_is_given_up_does_not_disturb_the_next_and_a_window_bounds_what_waits(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedskew.federation.simulate.ray.MAX_WAITING_BYTES", 1)  # room for as few as may be
    world = digits(FedAvg(), split="iid:clients=12")
    pool = Actors(world, 1)
    pool.start()
    try:
        begun: list[int] = []
        hand_out = pool._hand_out
        monkeypatch.setattr(pool, "_hand_out", lambda job, *rest: (begun.append(job.item), hand_out(job, *rest))[1])
        # client 3 is the largest, but out of the window of two; then it is the first to go
        jobs = [Job("train", 0, "train", c, weight) for c, weight in enumerate([1, 5, 3, 9, 2, 2])]
        given_up = pool.map(jobs, world.initial, lambda client: b"")
        next(given_up)
        assert begun == [1, 0]
        begun.clear()
        results = list(pool.map(jobs, world.initial, lambda client: b""))
        assert begun == [1, 0, 3, 2, 4, 5]
        for job, result in zip(jobs, results, strict=True):
            assert isinstance(result, Trained)
            with one_thread():
                alone = world.train_client(job.item, 0, "train", world.initial, {})
            assert digest(result.update.payload) == digest(alone.update.payload)
    finally:
        pool.close()


def test_more_workers_than_there_are_cpus_are_refused(ray: Any) -> None:
    with pytest.raises(UsageError, match="--workers 9 is invalid: Ray has 2 CPUs"):
        Simulation(digits(FedAvg()), workers=9, engine="ray")


def test_what_fails_in_our_own_code_is_not_taken_for_a_lost_client(ray: Any) -> None:
    world = digits(FedAvg())
    pool = Actors(world, 1)
    pool.start()
    try:
        with pytest.raises(Exception, match="RuntimeError: upper bound"):
            next(pool.map([Job("evaluate_global", 0, "evaluate", 10**6)], world.initial, bytes))
    finally:
        pool.close()


def test_the_command_has_its_own_ray_and_survives_a_dead_actor(tmp_path: Path) -> None:
    """stdout is one JSON object, whatever Ray has to say; nothing of Ray is left running."""
    code = f"from fedskew.cli.main import main; main({[*COMMAND, '--out', str(tmp_path / 'run')]!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["lost"] == 1
    assert "round 2: client 2 crashed its worker process twice" in done.stderr
    here = Run(Experiment(rounds=2, trouble=replace(Experiment().trouble, fault=FAULT)), workers=1)
    list(here)
    assert result["digest"] == here.result.digest


FAULT = "die:client=2,round=1"
COMMAND = ["run", "--engine", "ray", "--workers", "2", "--rounds", "2", "--fault", FAULT, "--json"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def test_without_ray_or_with_an_engine_there_is_not_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, sentence in (
        (["--engine", "rya"], "--engine rya is invalid: expected processes or ray."),
        (["--engine", "ray"], "this needs the package ray: pip install 'fedskew[ray]'."),
    ):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(SystemExit) as end:
            main(["run", *arguments])
        assert end.value.code == 2
        assert capsys.readouterr().err.strip() == f"fedskew: {sentence}"


class NoRay:
    """A package whose cluster nobody should have asked for."""

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def shutdown() -> None:
        """Nothing was begun."""


def test_a_cluster_that_does_not_answer_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("fedskew.federation.simulate.ray.import_ray", NoRay)
    with pytest.raises(UsageError, match=f"Ray at RAY_ADDRESS={address} cannot be used: .*refused"):
        Simulation(digits(FedAvg()), workers=2, engine="ray")


def test_a_device_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match="Ray actors run on CPUs only, but the device is cuda"):
        Simulation(replace(digits(FedAvg()), device="cuda"), engine="ray")
