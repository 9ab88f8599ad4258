"""A study's processes end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedskew.studies.pool import process_pool
from helpers.processes import alive

# the battery, with a run that never ends in place of a real one
STUCK = """
import os, signal, sys, time
from pathlib import Path
from fedskew.studies import soundness

def stuck(job, out):
    (out / str(os.getpid())).touch()
    time.sleep(3600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    soundness.rates = lambda nets, *_: dict.fromkeys(nets, 0.1)
    soundness.run_job = stuck
    soundness.run_battery(Path(sys.argv[1]), methods=["fedavg"], nets=["mlp"], splits=["iid"], workers=2, say=print)
"""
PATIENCE = 120  # seconds, for a machine that is busy


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_of_a_battery_end_when_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """They would go on computing, and hold the locks of their runs, so that the battery could not be resumed."""
    script, started = tmp_path / "stuck.py", tmp_path / "started"
    script.write_text(STUCK)
    started.mkdir()
    battery = subprocess.Popen([sys.executable, str(script), str(started)], stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: len(list(started.iterdir())) == 2)
        workers = [int(path.name) for path in started.iterdir()]
        assert all(map(alive, workers))
        battery.send_signal(number)
        assert battery.wait(PATIENCE) != 0
        assert eventually(lambda: not any(map(alive, workers)))
    finally:
        battery.kill()
        for path in started.iterdir():
            if alive(int(path.name)):
                os.kill(int(path.name), signal.SIGKILL)


@pytest.mark.slow  # starts processes
def test_results_come_in_the_order_of_the_jobs() -> None:
    with process_pool(2) as map_jobs:
        assert list(map_jobs(pow, [1, 2, 3, 4], [2] * 4)) == [1, 4, 9, 16]
        assert list(map_jobs(abs, [-5])) == [5]
