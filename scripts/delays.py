"""Faults of time and of consent between a server and three sites on this machine: checks that nothing is lost.

python scripts/delays.py                        all of them, about ten minutes
python scripts/delays.py stopped                only this
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import arguments, check, expected, records, run_named
from trial import FEDSKEW, Process, Trial

LONG = 900.0  # seconds, on a busy machine


def stopped(folder: Path) -> None:
    """The server is suspended for 75 s during a round (a suspended machine): it goes on, and nothing is lost."""
    method, rounds, epochs = "scaffold", 4, 100
    undisturbed = expected(method, rounds, epochs)
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, method, rounds, epochs, "--timeout", "60"))
        for name in trial.sites:
            trial.join(name, port, "--data", "digits")
        server.wait_for("round 2/", LONG)
        server.freeze(True)
        time.sleep(75)
        server.freeze(False)
        check(server.end(LONG) == 0, "the run ends")
        check(not any(record["lost"] for record in records(folder)), "no update was lost")
        check(trial.result("run")["digest"] == undisturbed["digest"], "the digest is that of an undisturbed run")


SLOW_SITE = """
import sys, time
from fedskew.cli.main import main
from fedskew.deploy import node
quick = node.load
def slow(*given):
    time.sleep(float(sys.argv[1]))
    return quick(*given)
node.load = slow
main(sys.argv[2:])
"""


def loading(folder: Path) -> None:
    """A site needs 90 s to load its data, and a second one never comes: the first takes part, the second is named."""
    with Trial(folder) as trial:
        more = ("--patience", "60", "--timeout", "20", "--quorum", "1")
        server, port = trial.serve(*arguments(folder, "fedavg", 12, 1, *more))
        trial.join("north", port, "--data", "digits")
        certs, state = folder / "certs" / "south", folder / "state" / "south"
        command = ["join", "--server", f"127.0.0.1:{port}", "--certs", str(certs), "--state", str(state)]
        with (folder / "south.log").open("wb") as log:
            slow = subprocess.Popen(
                [sys.executable, "-c", SLOW_SITE, "90", *command, "--data", "digits"], stdout=log, stderr=log
            )
        try:
            check(server.end(LONG) == 5, "the exit code says that a site never took part")
        finally:
            slow.kill()
            slow.wait()
        check("never took part: west" in server.output(), "the site that never came is named")
        trained = [record["trained"] for record in records(folder)]
        check(0 in trained[0] and 1 in trained[-1], "the slow site trains as soon as it can")


def consent(folder: Path) -> None:
    """A server comes back with another experiment: sites refuse it until their operators agree."""
    with Trial(folder, ("north",)) as trial:
        what = ["--method", "fedavg", "--split", "iid:clients=1", "--rounds", "1", "--patience", "30"]
        first, port = trial.serve(*what, "--out", str(folder / "run"))
        site = trial.join("north", port, "--data", "digits", "--stay")
        check(first.end(LONG) == 0, "the first experiment is served")
        other, _ = trial.serve(*what, "--seed", "1", "--out", str(folder / "other"), port=port)
        mark = site.wait_for(r"join --accept ([0-9a-f]{16})", LONG)
        check(other.end(LONG) == 3, "another one is not")
        site.kill()
        trial.join("north", port, "--data", "digits", "--accept", mark)
        again, _ = trial.serve("--resume", str(folder / "other"), port=port)
        check(again.end(LONG) == 0, "it is served after the operator agreed")


def revoked(folder: Path) -> None:
    """A key is revoked during a run: the site is refused at once, and the others go on."""
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, "fedavg", 40, 5, "--timeout", "60"))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 3/", LONG)
        command = ["certs", "revoke", "--sites", "west", "--out", str(folder / "certs")]
        subprocess.run([*FEDSKEW, *command], check=True, stdout=subprocess.DEVNULL)
        sites["west"].wait_for("does not know this key", LONG)
        check(True, "the site is refused, and says why")
        check(server.end(LONG) == 0, "the run ends")
        check(all(record["trained"][:2] == [0, 1] for record in records(folder)), "the others went on")
        check(records(folder)[-1]["trained"] == [0, 1], "the revoked site did not")


def damaged(folder: Path) -> None:
    """A site's state is damaged: it says how to go on without it, and does."""
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, "scaffold", 60, 20, "--timeout", "60"))
        sites: dict[str, Process] = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 2/", LONG)
        for path in (folder / "state" / "west").rglob("*.safetensors"):
            path.write_bytes(b"damaged")
        sites["west"].kill()
        for path in (folder / "state" / "west").rglob("*.safetensors"):
            path.write_bytes(b"damaged")
        again = trial.join("west", port, "--data", "digits")
        again.wait_for("fedskew join --fresh-state", LONG)
        again.kill()
        trial.join("west", port, "--data", "digits", "--fresh-state")
        check(server.end(LONG) == 0, "the run ends")
        check(2 in records(folder)[-1]["trained"], "the site takes part again")


DELAYS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (stopped, loading, consent, revoked, damaged)}


if __name__ == "__main__":
    run_named(DELAYS)
