"""A server and its sites as processes on this machine, for trials: started, watched, always ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FEDSKEW = [sys.executable, "-m", "fedskew"]


def end_tidily() -> None:
    """Being told to end, a script ends its processes too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and children would too


class Process:
    """One command, its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log, self.arguments = log, arguments
        with log.open("ab") as file:
            self.began = file.tell()
            self.process = subprocess.Popen([*FEDSKEW, *arguments], stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        return self.log.read_bytes()[self.began :].decode()

    def wait_for(self, pattern: str, seconds: float = 180, count: int = 1) -> str:
        """The first group of the pattern's count-th match in the output."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.findall(pattern, self.output())
            if len(found) >= count:
                return str(found[count - 1])
            if self.process.poll() is not None and not re.search(pattern, self.output()):
                break
            time.sleep(0.05)
        raise RuntimeError(f"no '{pattern}' from {' '.join(self.arguments)}:\n{self.output()}")

    def end(self, seconds: float = 300) -> int:
        return self.process.wait(timeout=seconds)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def freeze(self, stop: bool) -> None:
        """This process and its children stand still, or go on."""
        for pid in (self.process.pid, *children(self.process.pid)):
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGCONT)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


class Trial:
    """A folder, keys for the sites, and the processes; `with` ends them all."""

    def __init__(self, folder: Path, sites: tuple[str, ...] = ("north", "south", "west")) -> None:
        self.folder, self.sites = folder, sites
        self.running: list[Process] = []
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [*FEDSKEW, "certs", "--sites", ",".join(sites), "--out", str(folder / "certs")],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def serve(self, *arguments: str, port: str = "0") -> tuple[Process, str]:
        certs = str(self.folder / "certs" / "server")
        server = self._run("server", "serve", "--certs", certs, "--port", port, *arguments)
        return server, server.wait_for(r"ready: https://127\.0\.0\.1:(\d+)")

    def join(self, site: str, port: str, *arguments: str) -> Process:
        certs, state = str(self.folder / "certs" / site), str(self.folder / "state" / site)
        where = ["--server", f"127.0.0.1:{port}", "--certs", certs, "--state", state]
        return self._run(site, "join", *where, *arguments)

    def _run(self, name: str, *arguments: str) -> Process:
        process = Process(self.folder / f"{name}.log", *arguments)
        self.running.append(process)
        return process

    def result(self, run: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / run / "result.json").read_text()))

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.running:
            if process.process.poll() is None:
                process.process.terminate()
        for process in self.running:
            try:
                process.end(15)
            except subprocess.TimeoutExpired:
                process.kill()
