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
import multiprocessing
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


def answer_all(folder: Path, names: list[str], address: str, size: int, first_slow: float, pids: Any) -> None:
    """All sites, in a process of their own: each answers every request with the same bytes, until killed."""
    blob = os.urandom(size)
    processes = []
    for name in names:
        keys = folder / "certs" / name
        config = {"server": address, "insecure": False}
        config |= {"ca": (keys / "ca.crt").read_text(), "key": (keys / "site.key").read_text()}
        processes.append(FlowerProcess("carrier", config, folder / f"{name}.log"))
        slow = first_slow if name == names[0] else 0.0
        threading.Thread(target=answer, args=(processes[-1], blob, slow), daemon=True).start()
    pids.put([process.process.pid for process in processes])
    threading.Event().wait()


def answer(process: FlowerProcess, blob: bytes, slow: float) -> None:
    """Answer every request of one site."""
    while (frame := process.receive()) is not None:
        if frame[0]["event"] == "request":
            time.sleep(slow)
            header = as_header(Answer(run=RUN, round=int(frame[0]["header"]["round"]), name="x", weight=1.0))
            process.send(header, blob)


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
    names, size = [f"site-{i:02d}" for i in range(count)], int(megabytes * 1e6)
    blob = os.urandom(size)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_certs(folder / "certs", [], names, 30)
        hosting = Hosting(port=0, certs=folder / "certs" / "server")
        link = FlowerProcess("link", hosting.config(), folder / "link.log", folder / "spool")
        ready = link.receive(300)
        assert ready is not None
        context = multiprocessing.get_context("spawn")
        pids = context.Queue()
        address = f"127.0.0.1:{ready[0]['port']}"
        sites = context.Process(target=answer_all, args=(folder, names, address, size, first_slow, pids), daemon=True)
        sites.start()
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
        watched = [link.process.pid, *pids.get()]
        before = [cpu_seconds(pid) for pid in watched]
        time.sleep(quiet)
        used = [(cpu_seconds(pid) - was) / quiet if quiet else 0.0 for pid, was in zip(watched, before, strict=True)]
        result = {
            "sites": count,
            "megabytes": megabytes,
            "seconds of each wave": seconds,
            "server's Flower process, peak MB": round(peak_megabytes(link.process.pid)),
            "server, peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "CPU of a waiting site": round(sum(used[1:]) / count, 4),
            "CPU of the server while they wait": round(used[0], 4),
        }
        link.close()
        sites.kill()
        sites.join()
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
