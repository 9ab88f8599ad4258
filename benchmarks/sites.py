"""What many sites cost the server: seconds of a wave of requests, CPU of waiting sites, and its peak memory.

python benchmarks/sites.py --sites 3 10 30                     small replies: seconds of a wave
python benchmarks/sites.py --sites 3 10 --megabytes 44         replies as large as resnet18: peak memory

The server's Flower process is the real one, and so is the Flower process of each site, over TLS with keys on 127.0.0.1.
In place of `fedskew join` a thread sends the reply at once, or with --first-slow N seconds later for the first site:
the server cannot use the others before. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fedskew.deploy.certs import make_certs
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import Answer, Request, as_header
from fedskew.deploy.roster import Roster

RUN = "0" * 16


def site(process: FlowerProcess, blob: bytes, slow: float) -> None:
    """Answer every request with the same bytes."""
    while (frame := process.receive()) is not None:
        if frame[0]["event"] == "request":
            time.sleep(slow)
            answer = Answer(run=RUN, round=int(frame[0]["header"]["round"]), name="x", weight=1.0)
            process.send(as_header(answer), blob)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    """The largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(count: int, megabytes: float, waves: int, first_slow: float, quiet: float) -> dict[str, Any]:
    """The figures of one number of sites."""
    blob, names = os.urandom(int(megabytes * 1e6)), [f"site-{i:02d}" for i in range(count)]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_certs(folder / "certs", [], names, 30)
        hosting = Hosting(port=0, certs=folder / "certs" / "server")
        link = FlowerProcess("link", hosting.config(), folder / "link.log", folder / "spool")
        ready = link.receive(300)
        assert ready is not None
        address = f"127.0.0.1:{ready[0]['port']}"
        sites = []
        for i, name in enumerate(names):
            keys = folder / "certs" / name
            config = {"server": address, "insecure": False}
            config |= {"ca": (keys / "ca.crt").read_text(), "key": (keys / "site.key").read_text()}
            sites.append(FlowerProcess("carrier", config, folder / f"{name}.log"))
            slow = first_slow if i == 0 else 0.0
            threading.Thread(target=site, args=(sites[-1], blob, slow), daemon=True).start()
        roster = Roster(link, names, ready[0]["nodes"], lambda line: None)
        while len(roster.present()) < count:
            roster.handle_next(1.0)
        seconds = []
        for wave in range(waves):
            began = time.monotonic()
            requests = {c: Request("work", RUN, "sites", client=c, sites=count, round=wave) for c in range(count)}
            with roster.collect(requests, blob, 600.0) as replies:
                for client in range(count):
                    assert client in replies.frames, f"site {client} did not answer"
                    replies.drop(client)
            seconds.append(round(time.monotonic() - began, 2))
        before = [cpu_seconds(process.process.pid) for process in (link, *sites)]
        time.sleep(quiet)
        after = [cpu_seconds(process.process.pid) for process in (link, *sites)]
        used = [(b - a) / quiet for a, b in zip(before, after, strict=True)] if quiet else [0.0]
        result = {
            "sites": count,
            "megabytes": megabytes,
            "seconds of each wave": seconds,
            "server's Flower process, peak MB": round(peak_megabytes(link.process.pid)),
            "this process, peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "CPU of a waiting site": round(sum(used[1:]) / count, 4),
            "CPU of the server while they wait": round(used[0], 4),
        }
        for process in (*sites, link):
            process.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 10, 30])
    parser.add_argument("--megabytes", type=float, default=0.004)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--first-slow", type=float, default=0.0)
    parser.add_argument("--quiet", type=float, default=20.0)
    given = parser.parse_args()
    for count in given.sites:
        print(json.dumps(measure(count, given.megabytes, given.waves, given.first_slow, given.quiet)), flush=True)


if __name__ == "__main__":
    main()
