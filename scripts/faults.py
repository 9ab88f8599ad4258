"""What can go wrong between a server and its sites, done for real on this machine: is anything lost?

python scripts/faults.py                        all of it, a few minutes
python scripts/faults.py refusals cut           these
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial import Process, Trial, children, end_tidily

from fedskew.deploy import child
from fedskew.deploy.flower.frames import read_frame, write_frame
from fedskew.experiment.config import from_dict
from fedskew.experiment.run import Run

SPLIT = "dirichlet:alpha=0.5,clients=3"


def expected(method: str, rounds: int, epochs: int) -> dict[str, Any]:
    """The result of the same run in one process."""
    values = {"method": {"name": method}, "split": SPLIT, "rounds": rounds, "training": {"epochs": epochs}}
    run = Run(from_dict(values))
    list(run)
    return run.result


def arguments(folder: Path, method: str, rounds: int, epochs: int, *more: str) -> list[str]:
    what = ["--method", method, "--split", SPLIT, "--rounds", str(rounds), "--set", f"training.epochs={epochs}"]
    return [*what, "--out", str(folder / "run"), *more]


def check(true: bool, what: str) -> None:
    print(f"  {'yes' if true else 'NO '} {what}", flush=True)
    if not true:
        raise AssertionError(what)


def refusals(folder: Path) -> None:
    """An unknown key, a wrong authority, a stale clock, another name, Flower's other interfaces, Ctrl-C."""
    with Trial(folder) as trial, Trial(folder / "others", ("north",)) as others:
        server, port = trial.serve(*arguments(folder, "fedavg", 2, 1))
        ours, theirs = trial.folder / "certs" / "north", others.folder / "certs" / "north"

        mixed = folder / "certs" / "mixed"
        shutil.copytree(ours, mixed)
        shutil.copy(theirs / "site.key", mixed)
        stranger = trial.join("mixed", port, "--data", "digits")
        check(stranger.end(60) == 2 and "does not know this key" in stranger.output(), "an unknown key is refused")
        check("is not one of the registered sites'" in server.output(), "and the server says so")

        shutil.copy(theirs / "ca.crt", mixed)
        misled = trial.join("mixed", port, "--data", "digits")
        check(misled.end(60) == 2 and "certificate is not accepted" in misled.output(), "a wrong authority is refused")

        plain = Process(
            folder / "plain.log",
            "join",
            "--server",
            f"127.0.0.1:{port}",
            "--data",
            "digits",
            "--insecure",
            "--name",
            "north",
            "--state",
            str(folder / "plain"),
        )
        trial.running.append(plain)
        check("TLS" in plain.wait_for("(if it speaks TLS, join without --insecure)"), "a site without TLS is told")
        plain.interrupt()
        check(plain.end(15) == 130, "Ctrl-C ends a site with 130")

        for seconds, words in ((-3600, "s behind the server's"), (60, "s ahead of the server's")):
            text = stale(port, ours, seconds)
            check("clock: it is" in text and words in text, f"a wrong clock: {text}")

        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json"):
            check(status(port, path, ours / "ca.crt") == 404, f"{path} is closed")
        check(status(port, "/v1/fleet/pull-messages", ours / "ca.crt") == 401, "an unsigned request is refused")

        site = trial.join("north", port, "--data", "fmnist")
        site.wait_for("this run deals parts of digits")
        check(True, "a site that named other data takes no part, and says why")
        below = children(server.process.pid) + children(site.process.pid)
        server.interrupt()
        check(server.end(15) == 130, "Ctrl-C ends the server with 130")
        site.interrupt()
        site.end(15)
        check(not any(alive(pid) for pid in below), "no process is left")


def stale(port: str, certs: Path, seconds: float) -> str:
    """What a carrier whose clock is wrong is told."""
    patch = (
        "import datetime, flwr.supernode.node_auth_http_interceptor as signing; right = signing.now; "
        f"signing.now = lambda: right() + datetime.timedelta(seconds={seconds}); import importlib;"
    )
    start = child.START.replace("import importlib;", patch)
    command = [child.interpreter(), "-P", "-c", start, str(child.HERE), "carrier"]
    carrier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert carrier.stdin is not None
    assert carrier.stdout is not None
    config = {"server": f"127.0.0.1:{port}", "insecure": False}
    config |= {"ca": (certs / "ca.crt").read_text(), "key": (certs / "site.key").read_text()}
    write_frame(carrier.stdin, config)
    frame = read_frame(carrier.stdout)
    carrier.kill()
    carrier.wait()
    return str(frame[0]["text"]) if frame is not None else ""


def status(port: str, path: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", method="POST")
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def killed(folder: Path) -> None:
    """kill -9 of a site within a round, then of the server: the result is that of an undisturbed run."""
    method, rounds, epochs = "scaffold", 6, 150
    whole = expected(method, rounds, epochs)
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, method, rounds, epochs))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 2/")
        time.sleep(0.5)
        sites["south"].kill()
        sites["south"] = trial.join("south", port, "--data", "digits")
        sites["south"].wait_for("ready")
        check(True, "a killed site comes back")
        server.wait_for("round 4/", 180)
        below = children(server.process.pid)
        server.kill()
        time.sleep(1.0)
        check(not any(alive(pid) for pid in below), "a killed server leaves no process")
        again, _ = trial.serve("--resume", str(folder / "run"), port=port)
        check(
            "after round 4" in again.wait_for("(resuming .*)") or "after round 5" in again.output(),
            "the server goes on after the last finished round",
        )
        check(again.end(180) == 0, "the run ends")
        result = trial.result("run")
        lines = (folder / "run" / "records.jsonl").read_text().splitlines()
        check(not any(json.loads(line)["lost"] for line in lines), "no site's work was lost")
        check(result["digest"] == whole["digest"], "the digest is that of an undisturbed run")
        check(result["metrics"] == whole["metrics"], "and so are the figures")
        for site in sites.values():
            check(site.end(30) == 0, "a site ends with the run")
        modes = {oct(path.stat().st_mode & 0o777) for path in (folder / "state").rglob("*.safetensors")}
        check(modes == {"0o600"}, f"states on disk are private ({modes})")


SPOIL = """
import sys, torch
from fedskew.cli.main import main
from fedskew.deploy import node
from fedskew.federation.wire import decode, encode
honest = node.Node._work
def spoilt(self, ask, broadcast):
    answer, blob = honest(self, ask, broadcast)
    if ask.train and ask.round >= 1:
        payload = decode(bytearray(blob))
        first = next(iter(payload["parameters"]))
        if ask.round == 1:
            payload["parameters"][first].view(-1)[0] = float("nan")
        if ask.round == 2:
            payload["parameters"][first] = payload["parameters"][first][:1].clone()
        if ask.round == 3:
            payload["extra"] = {"noise": torch.randn(30_000_000)}
        if ask.round == 4:
            answer.weight = float("inf")
        if ask.round == 5:
            payload["extra"] = {"noise": torch.randn(1_500_000)}
        blob = encode(payload)
        if ask.round == 6:
            blob = b"garbage" * 100
    return answer, blob
node.Node._work = spoilt
main(sys.argv[1:])
"""


def spoilt(folder: Path) -> None:
    """A site that sends NaN, a wrong shape, too much, nonsense: left out, named, and the others go on."""
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, "fedavg", 8, 1, "--limit", "4", "--timeout", "60"))
        for name in ("north", "south"):
            trial.join(name, port, "--data", "digits")
        certs, state = folder / "certs" / "west", folder / "state" / "west"
        command = ["join", "--server", f"127.0.0.1:{port}", "--certs", str(certs), "--state", str(state)]
        with (folder / "west.log").open("wb") as log:
            bad = subprocess.Popen([sys.executable, "-c", SPOIL, *command, "--data", "digits"], stdout=log, stderr=log)
        try:
            check(server.end(300) == 0, "the run ends")
        finally:
            bad.kill()
            bad.wait()
        records = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]
        lost = [record["lost"].get("2", "") for record in records]
        print("   ", "\n     ".join(lost))
        check(lost[0] == "" and all(lost[1:7]), "every bad update is left out, and the site named")
        check("not finite" in lost[1] and "wanted" in lost[2] and "limit" in lost[3], "NaN, shape, size are told")
        check("not finite" in lost[4] and "limit" in lost[5] and "no reply" in lost[6], "weight, size, nonsense too")
        check(lost[7] == "" and all(record["trained"][:2] == [0, 1] for record in records), "the others went on")


def gone(folder: Path) -> None:
    """A site that stands still is late, one that dies for good is left out, and too few stop the run with its state."""
    with Trial(folder) as trial:
        more = ("--timeout", "8", "--quorum", "2")
        server, port = trial.serve(*arguments(folder, "scaffold", 60, 1, *more))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 3/")
        sites["west"].freeze(True)
        server.wait_for("site west did not answer within 8 s", 60)
        check(True, "a site that stands still is left out after the time-out")
        sites["west"].freeze(False)
        server.wait_for("site west answered too late: dropped", 60)
        check(True, "its late reply is dropped and noted")
        sites["south"].kill()
        sites["west"].kill()
        code = server.end(120)
        check(
            code == 3 and "Nothing is lost" in server.output(),
            f"below the quorum the run stops: {server.output()[-300:]}",
        )
        for name in ("south", "west"):
            sites[name] = trial.join(name, port, "--data", "digits")
        again, _ = trial.serve("--resume", str(folder / "run"), "--timeout", "30", port=port)
        check(again.end(240) == 0, "and goes on when they are back")


def online(folder: Path) -> None:
    """With --choose online a site that died is asked once more at most, and the cohort stays full."""
    with Trial(folder) as trial:
        more = ("--clients-per-round", "2", "--choose", "online", "--timeout", "8")
        server, port = trial.serve(*arguments(folder, "fedavg", 30, 1, *more))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 3/")
        sites["west"].kill()
        check(server.end(240) == 0, "the run ends")
        records = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]
        check(sum(len(record["lost"]) for record in records) <= 1, "the dead site is asked once at most")
        check(all(len(record["cohort"]) == 2 for record in records), "every cohort has two sites")


class Proxy:
    """A relay on loopback whose cable can be pulled."""

    def __init__(self, port: str) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = str(self.door.getsockname()[1]), int(port)
        self.up, self.lines = True, list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.door.accept()
            if not self.up:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.target))
            self.lines += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(a, b), daemon=True).start()

    @staticmethod
    def _relay(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                b.sendall(data)
        for line in (a, b):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self.up = False
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self.lines.clear()


def cut(folder: Path) -> None:
    """The network fails for ten seconds in the middle of a round: nothing is lost."""
    method, rounds, epochs = "scaffold", 5, 100
    whole = expected(method, rounds, epochs)
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, method, rounds, epochs))
        proxy = Proxy(port)
        for name in trial.sites:
            trial.join(name, proxy.port if name == "west" else port, "--data", "digits")
        server.wait_for("round 2/")
        proxy.cut()
        time.sleep(10)
        proxy.up = True
        check(server.end(240) == 0, "the run ends")
        lines = (folder / "run" / "records.jsonl").read_text().splitlines()
        check(not any(json.loads(line)["lost"] for line in lines), "no site's work was lost")
        check(trial.result("run")["digest"] == whole["digest"], "the digest is that of an undisturbed run")


FAULTS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (refusals, killed, spoilt, gone, online, cut)}


def main() -> None:
    end_tidily()
    for name in sys.argv[1:] or FAULTS:
        began = time.monotonic()
        print(f"{name}: {FAULTS[name].__doc__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            FAULTS[name](Path(folder))
        print(f"  in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
