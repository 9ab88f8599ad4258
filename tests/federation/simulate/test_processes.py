"""Worker processes: nothing is lost when one dies, nothing is left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedskew.core.files import PREFIX
from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.evaluation.scores import SMALL, ClientScore, score_of
from fedskew.federation.loop import run
from fedskew.federation.simulate.faults import parse_faults
from fedskew.federation.simulate.jobs import Job, Trained
from fedskew.federation.simulate.processes import DEPTH, LENT, Worker, Workers
from fedskew.federation.simulate.shared_memory import SlotFiles, make_shared_folder, remove_shared_folder
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.simulate.window import Window
from fedskew.federation.simulate.worker import pack, plain_result, read_result, unpack
from fedskew.federation.wire import digest
from fedskew.methods.fedavg import FedAvg
from helpers.processes import alive, leftovers, train
from toys import digits

pytestmark = pytest.mark.slow  # processes are started; where it does not matter how, by `quick_workers`


def test_a_killed_worker_is_replaced_and_its_client_tried_again() -> None:
    alone = train(Simulation(digits(FedAvg())))
    with Simulation(digits(FedAvg()), workers=2) as simulation:
        loop = run(FedAvg(), simulation, simulation.world.server_site, 3, lambda round: list(range(5)))
        next(loop)
        assert simulation.pool is not None
        for worker in simulation.pool.workers[:1]:
            os.kill(worker.process.pid, signal.SIGKILL)
        records = list(loop)
    assert not any(r.lost for r in records)
    assert digest(records[-1].server) == digest(alone[-1].server)


@pytest.mark.usefixtures("quick_workers")
def test_a_client_that_kills_its_worker_twice_is_left_out_with_a_note() -> None:
    faults = parse_faults("die:client=2,round=1")
    with Simulation(digits(FedAvg()), workers=2, faults=faults) as simulation:
        records = train(simulation)
    assert [r.lost for r in records] == [{}, {2: "crashed its worker process twice"}, {}]
    here = train(Simulation(digits(FedAvg()), faults=faults))
    assert digest(here[-1].server) == digest(records[-1].server)


@pytest.mark.usefixtures("quick_workers")
def test_nothing_is_left_after_a_normal_end_or_an_error() -> None:
    with Simulation(digits(FedAvg()), workers=2) as simulation:
        train(simulation, 1)
        assert leftovers()
    assert not leftovers()
    with pytest.raises(KeyError), Simulation(digits(FedAvg()), workers=2) as simulation:
        raise KeyError
    assert not leftovers()
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("fedskew")]


@pytest.mark.usefixtures("quick_workers")
def test_a_round_that_is_given_up_does_not_disturb_the_next() -> None:
    alone = train(Simulation(digits(FedAvg())), 1)
    with Simulation(digits(FedAvg()), workers=2) as simulation:
        server = simulation.world.initial
        replies = simulation.train(0, "train", [0, 1, 2, 3, 4], FedAvg().broadcast(server))
        next(replies)
        del replies
        records = train(simulation, 1)
    assert digest(records[-1].server) == digest(alone[-1].server)


@pytest.mark.usefixtures("quick_workers")
def test_results_wait_in_a_window_not_in_a_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few updates the window has 8 clients, 4 per worker; the largest of 40, the last, has to wait."""
    monkeypatch.setattr("fedskew.federation.simulate.processes.MAX_WAITING_BYTES", 1)
    world = digits(FedAvg(), split="iid:clients=40")
    with Simulation(world, workers=2) as simulation:
        pool = simulation.pool
        assert isinstance(pool, Workers)
        hand_out, started = pool._hand_out, set[int]()

        def watched(*arguments: Any) -> None:
            hand_out(*arguments)
            started.update(index for worker in pool.workers for index, _ in worker.running)

        monkeypatch.setattr(pool, "_hand_out", watched)
        jobs = [Job("train", 0, "train", client, weight=client) for client in range(40)]
        for passed_on, _ in enumerate(pool.map(jobs, world.initial, lambda client: b"")):
            assert max(started) < passed_on + 8


def test_the_largest_client_of_the_window_goes_first_to_the_least_busy_worker() -> None:
    """Weights 1, 5, 3, 9 with a window of three: 5 and 3 go out first, to one worker each; 9 has to wait."""

    class Pipe:
        def send_bytes(self, message: bytes) -> None:
            sent.append(unpack(message)["job"]["weight"])

    sent: list[int] = []
    pool = Workers(digits(FedAvg()), 2)
    try:
        files = SlotFiles(pool.folder, "state")
        pool.workers = [Worker(n, None, Pipe(), [0, 1], files, ready=True) for n in (1, 2)]  # type: ignore[arg-type]
        jobs = [Job("train", 0, "train", client, weight) for client, weight in enumerate([1, 5, 3, 9])]
        pool._hand_out(Window(jobs, 3), 1, ["broadcast", 0, 1], lambda client: b"")
        assert sent == [5, 3]
        assert [[index for index, _ in worker.running] for worker in pool.workers] == [[1], [2]]
    finally:
        remove_shared_folder(pool.folder)


def test_a_method_that_cannot_be_sent_is_a_mistake_that_says_so() -> None:
    @dataclasses.dataclass(frozen=True)
    class Here(Method):
        """Defined inside a function: another process cannot find it."""

    with pytest.raises(UsageError, match="top level of a module"):
        Simulation(digits(Here()), workers=2)
    assert not leftovers()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.federation.simulate.shared_memory.MEMORY", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    orphan, living = tmp_path / f"{PREFIX}{dead.pid}-x", tmp_path / f"{PREFIX}{os.getpid()}-y"
    for room in (orphan, living):
        room.mkdir()
    made = make_shared_folder(1)
    assert set(tmp_path.iterdir()) == {made, living}


ORPHAN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods.fedavg import FedAvg
from toys import digits
from helpers.processes import train
if __name__ == "__main__":
    simulation = Simulation(digits(FedAvg()), workers=2)
    train(simulation, 1)
    print(os.getpid(), *[w.process.pid for w in simulation.pool.workers], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_killed_parent_end_and_tidy_up(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN.format(tests=str(Path(__file__).parents[2])))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    parent, *pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (leftovers(parent) or any(alive(pid) for pid in pids)):
        time.sleep(0.05)
    assert not leftovers(parent)
    assert not any(alive(pid) for pid in pids)


def test_workers_send_predictions_and_counts_as_they_are() -> None:
    """Few scores travel as predictions, many as counts; a client that uses the server's model sends it once."""
    rng = torch.Generator().manual_seed(0)
    for n in (5, SMALL):
        one = score_of(torch.randn(n, 2, generator=rng), torch.randint(2, (n,), generator=rng), 2)
        for score in (ClientScore(3, one, one, True), ClientScore(3, None, one, False)):
            found = read_result("ClientScore", unpack(pack(plain_result(score))))
            assert found == score
            assert isinstance(found, ClientScore)
            assert found.personal.counts == one.counts
            assert (found.shared is found.personal) == (score.shared is score.personal)


@pytest.mark.usefixtures("quick_workers")
def test_updates_that_are_kept_stay_as_they_were_and_their_slots_come_back() -> None:
    """All 80 updates are kept, many more than the workers have slots."""
    world = digits(FedAvg(), split="iid:clients=80")
    jobs = [Job("train", 0, "train", client) for client in range(80)]
    with Simulation(world, workers=2) as simulation:
        pool = simulation.pool
        assert isinstance(pool, Workers)
        results = pool.map(jobs, world.initial, lambda client: b"")
        kept = [result.update for result in results if isinstance(result, Trained)]
        for client, update in enumerate(kept):
            alone = world.train_client(client, 0, "train", world.initial, {}).update
            assert digest(update.payload) == digest(alone.payload)
        assert any(worker.lent for worker in pool.workers)
        del update, kept
        assert [(worker.lent, len(worker.slots)) for worker in pool.workers] == [(0, LENT + DEPTH)] * 2
