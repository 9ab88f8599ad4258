"""Real faults in runs between a server and three sites on this machine: checks that nothing is lost.

python scripts/faults.py                        all of them, a few minutes
python scripts/faults.py refusals cut           only these
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial import Process, Proxy, Trial, alive, children, end_tidily

from fedskew.deploy import flower_process
from fedskew.deploy.flower.frames import read_frame, write_frame
from fedskew.experiment.config import from_dict
from fedskew.experiment.run import Run

SPLIT = "dirichlet:alpha=0.5,clients=3"


def expected(method: str, rounds: int, epochs: int) -> dict[str, Any]:
    """The result of the same run in one process, as in result.json."""
    values = {"method": {"name": method}, "split": SPLIT, "rounds": rounds, "training": {"epochs": epochs}}
    run = Run(from_dict(values))
    list(run)
    assert run.result is not None
    return run.result.as_dict()


def arguments(folder: Path, method: str, rounds: int, epochs: int, *more: str) -> list[str]:
    """The arguments of `fedskew serve`."""
    what = ["--method", method, "--split", SPLIT, "--rounds", str(rounds), "--set", f"training.epochs={epochs}"]
    return [*what, "--out", str(folder / "run"), *more]


def check(passed: bool, what: str) -> None:
    """Print whether a check passed; stop if not."""
    print(f"  {'yes' if passed else 'NO '} {what}", flush=True)
    if not passed:
        raise AssertionError(what)


def refusals(folder: Path) -> None:
    """An unknown key, a wrong authority, a wrong clock, other data, Flower's other interfaces, Ctrl-C."""
    with Trial(folder) as trial, Trial(folder / "others", ("north",)) as others:
        server, port = trial.serve(*arguments(folder, "fedavg", 2, 1))
        ours, theirs = trial.folder / "certs" / "north", others.folder / "certs" / "north"

        mixed = folder / "certs" / "mixed"
        shutil.copytree(ours, mixed)
        shutil.copy(theirs / "site.key", mixed)
        unknown = trial.join("mixed", port, "--data", "digits")
        check(unknown.end(600) == 2 and "does not know this key" in unknown.output(), "an unknown key is refused")
        check("is not the key of a registered site" in server.output(), "the server reports it")

        shutil.copy(theirs / "ca.crt", mixed)
        other_authority = trial.join("mixed", port, "--data", "digits")
        check(
            other_authority.end(600) == 2 and "certificate is not accepted" in other_authority.output(),
            "the certificate of another authority is refused",
        )

        options = ["--data", "digits", "--insecure", "--name", "north", "--state", str(folder / "plain")]
        plain = Process(folder / "plain.log", "join", "--server", f"127.0.0.1:{port}", *options)
        trial.running.append(plain)
        check("TLS" in plain.wait_for("(if it uses TLS, join without --insecure)"), "a site without TLS gets a hint")
        plain.interrupt()
        check(plain.end(60) == 130, "Ctrl-C ends a site with exit code 130")

        for seconds, words in ((-3600, "s behind the server's"), (60, "s ahead of the server's")):
            text = refusal_with_clock_off(port, ours, seconds)
            check("clock: it is" in text and words in text, f"a wrong clock: {text}")

        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json"):
            check(status(port, path, ours / "ca.crt") == 404, f"{path} is not available")
        check(status(port, "/v1/fleet/pull-messages", ours / "ca.crt") == 401, "an unsigned request is refused")

        site = trial.join("north", port, "--data", "fmnist")
        site.wait_for("this run splits digits")
        check(True, "a site with other data does not take part, and says why")
        child_processes = children(server.process.pid) + children(site.process.pid)
        server.interrupt()
        check(server.end(60) == 130, "Ctrl-C ends the server with exit code 130")
        site.interrupt()
        site.end(60)
        check(not any(alive(pid) for pid in child_processes), "no process is left")


def refusal_with_clock_off(port: str, certs: Path, seconds: float) -> str:
    """The reason for which the server refuses a site whose clock is `seconds` ahead."""
    patch = (
        "import datetime, flwr.supernode.node_auth_http_interceptor as signing; right = signing.now; "
        f"signing.now = lambda: right() + datetime.timedelta(seconds={seconds}); import importlib;"
    )
    bootstrap = flower_process.BOOTSTRAP.replace("import importlib;", patch)
    command = [flower_process.interpreter(), "-P", "-c", bootstrap, str(flower_process.MODULES), "carrier"]
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
    """The HTTP status of an empty POST request to the server."""
    context = ssl.create_default_context(cafile=str(ca))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", method="POST")
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def killed(folder: Path) -> None:
    """kill -9 of a site during a round, then of the server: the result is that of an undisturbed run."""
    method, rounds, epochs = "scaffold", 6, 150
    undisturbed = expected(method, rounds, epochs)
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, method, rounds, epochs))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 2/")
        time.sleep(0.5)
        sites["south"].kill()
        sites["south"] = trial.join("south", port, "--data", "digits")
        sites["south"].wait_for("ready")
        check(True, "a killed site joins again")
        server.wait_for("round 4/", 600)
        child_processes = children(server.process.pid)
        server.kill()
        time.sleep(1.0)
        check(not any(alive(pid) for pid in child_processes), "a killed server leaves no process")
        again, _ = trial.serve("--resume", str(folder / "run"), port=port)
        check(again.wait_for(r"after round (\d)") in "45", "the server resumes after the last finished round")
        check(again.end(600) == 0, "the run ends")
        result = trial.result("run")
        check(not any(record["lost"] for record in records(folder)), "no update was lost")
        check(result["digest"] == undisturbed["digest"], "the digest is that of an undisturbed run")
        check(result["metrics"] == undisturbed["metrics"], "and so are the metrics")
        for site in sites.values():
            check(site.end(90) == 0, "a site ends with the run")
        modes = {oct(path.stat().st_mode & 0o777) for path in (folder / "state").rglob("*.safetensors")}
        check(modes == {"0o600"}, f"states on disk are private ({modes})")


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run as they are in records.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]


BAD_SITE = """
import sys, torch
from fedskew.cli.main import main
from fedskew.deploy import node
from fedskew.federation.wire import decode, encode
correct = node.Node._work
def corrupted(self, request, broadcast):
    answer, blob = correct(self, request, broadcast)
    if request.train and request.round >= 1:
        payload = decode(bytearray(blob))
        first = next(iter(payload["parameters"]))
        if request.round == 1:
            payload["parameters"][first].view(-1)[0] = float("nan")
        if request.round == 2:
            payload["parameters"][first] = payload["parameters"][first][:1].clone()
        if request.round == 3:
            payload["extra"] = {"noise": torch.randn(30_000_000)}
        if request.round == 4:
            answer.weight = float("inf")
        if request.round == 5:
            payload["extra"] = {"noise": torch.randn(1_500_000)}
        blob = encode(payload)
        if request.round == 6:
            blob = b"garbage" * 100
    return answer, blob
node.Node._work = corrupted
main(sys.argv[1:])
"""


def corrupt(folder: Path) -> None:
    """A site that sends NaN, a wrong shape, too much or garbage is left out with the reason; the others continue."""
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, "fedavg", 8, 1, "--limit", "4", "--timeout", "60"))
        for name in ("north", "south"):
            trial.join(name, port, "--data", "digits")
        certs, state = folder / "certs" / "west", folder / "state" / "west"
        command = ["join", "--server", f"127.0.0.1:{port}", "--certs", str(certs), "--state", str(state)]
        with (folder / "west.log").open("wb") as log:
            bad = subprocess.Popen(
                [sys.executable, "-c", BAD_SITE, *command, "--data", "digits"], stdout=log, stderr=log
            )
        try:
            check(server.end(900) == 0, "the run ends")
        finally:
            bad.kill()
            bad.wait()
        rounds = records(folder)
        lost = [record["lost"].get("2", "") for record in rounds]
        print("   ", "\n     ".join(lost))
        check(lost[0] == "" and all(lost[1:7]), "every bad update is left out")
        check("not finite" in lost[1] and "expected" in lost[2] and "limit" in lost[3], "reasons: NaN, shape, size")
        check("not finite" in lost[4] and "limit" in lost[5] and "invalid" in lost[6], "reasons: weight, size, garbage")
        check(lost[7] == "" and all(record["trained"][:2] == [0, 1] for record in rounds), "the others continued")


def gone(folder: Path) -> None:
    """A suspended site is late, killed sites are left out, and with too few sites the run stops and can be resumed."""
    with Trial(folder) as trial:
        more = ("--timeout", "8", "--quorum", "2")
        server, port = trial.serve(*arguments(folder, "scaffold", 60, 1, *more))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 3/")
        sites["west"].freeze(True)
        server.wait_for("site west did not answer within 8 s", 60)
        check(True, "a suspended site is left out after the timeout")
        sites["west"].freeze(False)
        server.wait_for("site west answered too late: dropped", 60)
        check(True, "its late reply is dropped and reported")
        sites["south"].kill()
        sites["west"].kill()
        code = server.end(400)
        check(code == 3, f"below the quorum the run stops: {server.output()[-300:]}")
        for name in ("south", "west"):
            sites[name] = trial.join(name, port, "--data", "digits")
        again, _ = trial.serve("--resume", str(folder / "run"), "--timeout", "30", port=port)
        check(again.end(600) == 0, "it continues when they have joined again")


def online(folder: Path) -> None:
    """With --choose online a killed site is asked at most once more, and every cohort has its full size."""
    with Trial(folder) as trial:
        more = ("--clients-per-round", "2", "--choose", "online", "--timeout", "8")
        server, port = trial.serve(*arguments(folder, "fedavg", 30, 1, *more))
        sites = {name: trial.join(name, port, "--data", "digits") for name in trial.sites}
        server.wait_for("round 3/")
        sites["west"].kill()
        check(server.end(600) == 0, "the run ends")
        rounds = records(folder)
        check(sum(len(record["lost"]) for record in rounds) <= 1, "the killed site is asked at most once")
        check(all(len(record["cohort"]) == 2 for record in rounds), "every cohort has two sites")


def cut(folder: Path) -> None:
    """The network fails for ten seconds during a round: nothing is lost."""
    method, rounds, epochs = "scaffold", 5, 100
    undisturbed = expected(method, rounds, epochs)
    with Trial(folder) as trial:
        server, port = trial.serve(*arguments(folder, method, rounds, epochs))
        proxy = Proxy(port)
        for name in trial.sites:
            trial.join(name, proxy.port if name == "west" else port, "--data", "digits")
        server.wait_for("round 2/")
        proxy.cut()
        time.sleep(10)
        proxy.up = True
        check(server.end(600) == 0, "the run ends")
        check(not any(record["lost"] for record in records(folder)), "no update was lost")
        check(trial.result("run")["digest"] == undisturbed["digest"], "the digest is that of an undisturbed run")


FAULTS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (refusals, killed, corrupt, gone, online, cut)}


def run_named(trials: dict[str, Callable[[Path], None]]) -> None:
    """Carry out the trials named on the command line, or all, each in an empty folder."""
    end_tidily()
    for name in sys.argv[1:] or trials:
        began = time.monotonic()
        print(f"{name}: {trials[name].__doc__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            trials[name](Path(folder))
        print(f"  in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    run_named(FAULTS)
