"""A server and its sites as processes on this machine. The processes are always ended, also after an error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FEDSKEW = [sys.executable, "-m", "fedskew"]


def end_tidily() -> None:
    """Make SIGTERM and Ctrl-C raise an exception, so that a script ends its processes too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT by default


class Process:
    """A fedskew command in a process, with its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log, self.arguments = log, arguments
        with log.open("ab") as file:
            self.offset = file.tell()  # of this process's output in the file
            self.process = subprocess.Popen([*FEDSKEW, *arguments], stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        """What the process has printed so far."""
        return self.log.read_bytes()[self.offset :].decode()

    def wait_for(self, pattern: str, seconds: float = 600, count: int = 1) -> str:
        """Wait until the output matches a pattern `count` times; returns the first group of that match."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            matches = re.findall(pattern, self.output())
            if len(matches) >= count:
                return str(matches[count - 1])
            if self.process.poll() is not None and not re.search(pattern, self.output()):
                break
            time.sleep(0.05)
        raise RuntimeError(f"no '{pattern}' in the output of {' '.join(self.arguments)}:\n{self.output()}")

    def end(self, seconds: float = 300) -> int:
        """Wait for the end of the process; returns its exit code."""
        return self.process.wait(timeout=seconds)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def freeze(self, stop: bool) -> None:
        """Suspend this process and its children; with `stop` False, continue them."""
        for pid in (self.process.pid, *children(self.process.pid)):
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGCONT)


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listing.stdout.split()]


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


class Trial:
    """A folder with keys for a server and its sites, and their processes. Leaving the `with` block ends them all."""

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
        """Start the server; returns it and its port once it is ready. Port 0 chooses a free one."""
        certs = str(self.folder / "certs" / "server")
        server = self._run("server", "serve", "--certs", certs, "--port", port, *arguments)
        return server, server.wait_for(r"ready: https://127\.0\.0\.1:(\d+)")

    def join(self, site: str, port: str, *arguments: str) -> Process:
        """Start a site."""
        certs, state = str(self.folder / "certs" / site), str(self.folder / "state" / site)
        common = ["--server", f"127.0.0.1:{port}", "--certs", certs, "--state", state]
        return self._run(site, "join", *common, *arguments)

    def _run(self, name: str, *arguments: str) -> Process:
        process = Process(self.folder / f"{name}.log", *arguments)
        self.running.append(process)
        return process

    def result(self, run: str) -> dict[str, Any]:
        """The contents of a run's result.json."""
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


class Proxy:
    """Forwards connections on 127.0.0.1 to another port there, until `cut`; setting `up` restores the connection."""

    def __init__(self, port: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = str(self.listener.getsockname()[1]), int(port)
        self.up, self.connections = True, list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            if not self.up:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # the server is down
                near.close()
                continue
            self.connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self.up = False
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()
