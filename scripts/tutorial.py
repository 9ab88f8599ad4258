"""Runs the commands of docs/deployment.md, one after another, in an empty folder and on a free port."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from trial import FEDSKEW, Process, end_tidily

PAGE = Path(__file__).parents[1] / "docs" / "deployment.md"


def free_port() -> str:
    """A port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def main() -> None:
    end_tidily()
    blocks = re.findall(r"```(python|sh)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    port, running = free_port(), list[Process]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for kind, text in blocks:
                if kind == "python":
                    subprocess.run([sys.executable, "-c", text], check=True)
                    continue
                for line in text.replace("8470", port).splitlines():
                    print(f"$ {line}", flush=True)
                    command, *words = line.split()[1:]
                    if command == "certs":
                        subprocess.run([*FEDSKEW, command, *words], check=True)
                        continue
                    more = ["--port", port] if command == "serve" else []
                    running.append(Process(Path(f"{len(running)}.log"), command, *words, *more))
                    running[-1].wait_for("ready")
            for process in running:
                if process.end():
                    raise RuntimeError(process.output())
                print(process.output())
            result = json.loads(Path("runs/hospitals/result.json").read_text())
            accuracy = result["metrics"]["clients"]["personal"]["mean"]
            print(f"accuracy of the personal models, mean over hospitals: {accuracy:.3f}")
        finally:
            for process in running:
                if process.process.poll() is None:
                    process.process.terminate()
                    process.end(15)


if __name__ == "__main__":
    main()
