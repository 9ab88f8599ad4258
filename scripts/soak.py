"""Runs between a server and five sites with random faults for half an hour: each must end like the simulator's.

python scripts/soak.py                          30 minutes, 5 sites
python scripts/soak.py --minutes 2 --seed 7     a short trial; the seed decides which faults happen

Faults: kill -9 of the server, of a site, or of the Flower process of either; a pause (SIGSTOP) of either; a cut
network; garbage sent to the server's port. After each the run must go on by itself, except that a server or a site
that was killed is started again, as a service manager would.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trial import Process, Proxy, Trial, children, end_tidily

from fedskew.experiment.config import from_dict
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import read_run

METHOD, ROUNDS, EPOCHS = "scaffold", 12, 60
GRACE = "300"  # seconds a killed site has to come back; a busy machine needs a minute to start it
QUIET = (2.0, 8.0)  # seconds between faults
LONGEST_RUN = 1200.0  # seconds


def simulated(seed: int, sites: int) -> str:
    """The digest of the same run in one process."""
    values = {"method": {"name": METHOD}, "split": split(sites), "rounds": ROUNDS, "seed": seed}
    run = Run(from_dict(values | {"training": {"epochs": EPOCHS}}))
    list(run)
    assert run.result is not None
    return run.result.digest


def split(sites: int) -> str:
    """How the digits are split."""
    return f"dirichlet:alpha=0.5,clients={sites}"


class Soak:
    """One run with its faults."""

    def __init__(self, trial: Trial, out: str, seed: int, rng: random.Random) -> None:
        self.trial, self.out, self.rng = trial, out, rng
        options = ["--method", METHOD, "--split", split(len(trial.sites)), "--rounds", str(ROUNDS), "--seed", str(seed)]
        options += ["--grace", GRACE, "--set", f"training.epochs={EPOCHS}", "--out", str(trial.folder / out)]
        self.server, self.port = trial.serve(*options)
        self.proxies = {name: Proxy(self.port) for name in trial.sites}
        self.sites = {name: self._join(name) for name in trial.sites}

    def _join(self, name: str) -> Process:
        return self.trial.join(name, self.proxies[name].port, "--data", "digits", "--allow", f"method={METHOD}")

    def _resume(self) -> None:
        self.server.process.wait()
        self.server, _ = self.trial.serve(
            "--resume", str(self.trial.folder / self.out), "--grace", GRACE, port=self.port
        )

    def kill_server(self) -> None:
        self.server.kill()
        self._resume()

    def kill_link(self) -> None:
        """The server ends with its Flower process, and is started again."""
        if self._kill_children(self.server):
            self._resume()

    def kill_site(self) -> None:
        name = self.rng.choice(self.trial.sites)
        self.sites[name].kill()
        self.sites[name] = self._join(name)

    def kill_carrier(self) -> None:
        """A site ends with its Flower process, and is started again. Nothing happens while it is still starting."""
        name = self.rng.choice(self.trial.sites)
        if not self._kill_children(self.sites[name]):
            return
        self.sites[name].process.wait()
        self.sites[name] = self._join(name)

    def pause_server(self) -> None:
        self._pause(self.server, self.rng.choice((5.0, 75.0)))

    def pause_site(self) -> None:
        self._pause(self.sites[self.rng.choice(self.trial.sites)], self.rng.uniform(2.0, 12.0))

    def cut(self) -> None:
        proxy = self.proxies[self.rng.choice(self.trial.sites)]
        proxy.cut()
        time.sleep(self.rng.uniform(1.0, 10.0))
        proxy.up = True

    def garbage(self) -> None:
        """Random bytes, and a connection that says nothing."""
        for text in (
            self.rng.randbytes(1000),
            b"POST /v1/fleet/push-object HTTP/1.1\r\ncontent-length: 9\r\n\r\n",
            b"",
        ):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self.port)), 5) as connection:
                connection.sendall(text)

    @staticmethod
    def _kill_children(process: Process) -> bool:
        """kill -9 of the child processes; False if there are none."""
        found = children(process.process.pid)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    @staticmethod
    def _pause(process: Process, seconds: float) -> None:
        process.freeze(True)
        time.sleep(seconds)
        process.freeze(False)

    def faults(self) -> list[Callable[[], None]]:
        """All faults, the frequent ones more than once."""
        kills = [self.kill_server, self.kill_link, self.kill_site, self.kill_carrier]
        return [*kills, self.pause_server, self.pause_site, self.cut, self.cut, self.garbage, self.garbage]

    def carry_out(self, until: float, done: Counter[str]) -> None:
        """Cause faults until the run ends, or the time is over; then let it end."""
        began = time.monotonic()
        self.server.wait_for("round 1/", LONGEST_RUN)
        while self.server.process.poll() is None and time.monotonic() - began < LONGEST_RUN:
            time.sleep(self.rng.uniform(*QUIET))
            if time.monotonic() < until and self.server.process.poll() is None:
                fault = self.rng.choice(self.faults())
                print(f"  {time.monotonic() - began:5.0f} s  {fault.__name__}", flush=True)
                fault()
                done[fault.__name__] += 1
        if self.server.end(LONGEST_RUN) != 0:
            raise SystemExit(f"the server ended with code {self.server.process.returncode}:\n{self.server.output()}")
        for site in self.sites.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                site.end(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end_tidily()
    until, rng, done = time.monotonic() + 60 * given.minutes, random.Random(given.seed), Counter[str]()
    runs = 0
    with tempfile.TemporaryDirectory() as folder:
        names = tuple(f"site-{i}" for i in range(given.sites))
        with Trial(Path(folder), names) as trial:
            while not runs or time.monotonic() < until:
                expected = simulated(given.seed + runs, given.sites)
                print(f"run {runs}", flush=True)
                Soak(trial, f"run-{runs}", given.seed + runs, rng).carry_out(until, done)
                run = read_run(Path(folder) / f"run-{runs}")
                lost = {record.round: record.lost for record in run.records if record.lost}
                same = run.result is not None and run.result.digest == expected
                print(
                    f"  {'the digest of the simulator' if same else 'ANOTHER DIGEST, not'} {expected[:16]}; "
                    f"left out: {lost or 'none'}",
                    flush=True,
                )
                if not same:
                    raise SystemExit(1)
                runs += 1
    print(f"{runs} runs of {ROUNDS} rounds, {sum(done.values())} faults: {dict(done)}")


if __name__ == "__main__":
    main()
