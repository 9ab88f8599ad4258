"""Runs the commands of docs/deployment.md in an empty folder: those of the tutorial, then those within the text."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from trial import FEDSKEW, Process, end_tidily

PAGE = Path(__file__).parents[1] / "docs" / "deployment.md"
EXPERIMENT = 'method = "fedavg"\ndata = "sites"\nrounds = 1\n'


def free_port() -> str:
    """A port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Reader:
    """Does what the page says; servers and sites stay in `running` until they end by themselves."""

    def __init__(self) -> None:
        self.running: list[Process] = []

    def run(self, line: str) -> None:
        """Run one command and check that it succeeds; start a server or a site and wait until it is ready."""
        print(f"$ {line}", flush=True)
        words = shlex.split(line)[1:]
        if words[0] not in ("serve", "join") or "--resume" in words:
            subprocess.run([*FEDSKEW, *words], check=True)
            return
        self.running.append(Process(Path(f"{len(self.running)}.log"), *words))
        self.running[-1].wait_for("ready")

    def wait(self) -> None:
        """Wait for the end of all servers and sites; RuntimeError if one of them failed."""
        for process in self.running:
            if process.end():
                raise RuntimeError(process.output())
            print(process.output())
        self.running = []

    def tutorial(self, page: str) -> None:
        """The blocks of Python and shell."""
        port = free_port()
        for kind, text in re.findall(r"```(python|sh)\n(.*?)```", page, re.DOTALL):
            if kind == "python":
                subprocess.run([sys.executable, "-c", text], check=True)
                continue
            for line in text.replace("8470", port).splitlines():
                self.run(line + (f" --port {port}" if " serve " in line else ""))
        self.wait()
        result = json.loads(Path("runs/hospitals/result.json").read_text())
        accuracy = result["metrics"]["clients"]["personal"]["mean"]
        print(f"accuracy of the personal models, mean over hospitals: {accuracy:.3f}")

    def remarks(self, page: str) -> None:
        """The commands within the text, in order; names of hosts and folders are replaced by those that exist here."""
        text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        lines = re.findall(
            r"^    (fedskew .*)|`(fedskew (?:certs|serve|join|status|forget) [^`]+)`", text, re.MULTILINE
        )
        port = free_port()
        Path("experiment.toml").write_text(EXPERIMENT)
        here = {"fl.example.org:8470": f"127.0.0.1:{port}", "8470": port, "fl.example.org,192.0.2.7": "127.0.0.1"}
        here |= {"/data/scans": "hospital-a.npz", "/var/lib/fedskew": "state-a", "STATE": "fedskew-state/hospital-a"}
        done = []
        for line in dict.fromkeys("".join(pair) for pair in lines):
            command = " ".join(line.split())
            for old, new in here.items():
                command = command.replace(old, new)
            if "--hosts" in command:  # the keys of the real hosts are others than those of the tutorial
                command += " --out real"
            if " serve --host" in command or " join " in command:
                command = command.replace("certs/", "real/")
            if " serve " in command and " --port " not in command:
                command += f" --port {free_port()}"
            self.run(command)
            if " join " in command:
                self.run(command.replace("hospital-a", "hospital-b").replace("state-a", "state-b"))
                self.wait()
            done.append(command)
        print(f"{len(done)} commands within the text")


def main() -> None:
    end_tidily()
    page, reader = PAGE.read_text(), Reader()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            reader.tutorial(page)
            reader.remarks(page)
        finally:
            for process in reader.running:
                if process.process.poll() is None:
                    process.process.terminate()
                    process.end(15)


if __name__ == "__main__":
    main()
