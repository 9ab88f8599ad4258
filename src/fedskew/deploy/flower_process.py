"""Flower in a process of its own, possibly in a separate environment, and the pipe to it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.deploy.flower.frames import Frame, Header, read_frame, write_frame

FLOWER = "1.41.0"  # the same version as in pyproject.toml
STOP_SECONDS = 5.0  # time the process has to end before it is killed
MODULES = Path(__file__).parent / "flower"
# Imports a module of that folder without importing fedskew, which needs torch. The modules use relative imports.
BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('flower_side'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['flower_side'] = package; import importlib; "
    "importlib.import_module('flower_side.' + sys.argv[2]).main()"
)
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def interpreter() -> str:
    """The path of a Python interpreter that has Flower.

    In this order: the environment that FEDSKEW_FLOWER names, this interpreter, and the environment in the folder
    `flower` of this one.
    """
    executable = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    if given := os.environ.get("FEDSKEW_FLOWER"):
        python = Path(given).expanduser() / executable
        if not python.exists():
            raise UsageError(f"FEDSKEW_FLOWER={given} is invalid: expected an environment that contains {executable}.")
        return str(python)
    if importlib.util.find_spec("flwr") is not None:
        if (installed := version("flwr")) != FLOWER:
            raise UsageError(f"flwr {installed} is installed, but {FLOWER} is needed: pip install 'fedskew[flower]'.")
        return sys.executable
    nested = Path(sys.prefix) / "flower" / executable
    if nested.exists():
        return str(nested)
    raise UsageError(
        "this needs Flower, which is not installed: pip install 'fedskew[flower]', or install "
        f"flwr=={FLOWER} in a separate environment and set FEDSKEW_FLOWER to its path."
    )


class FlowerProcess:
    """A process that runs one module of deploy/flower: "link", "carrier" or "keys".

    `config` is its first message, and `log` the file for its stderr (None: discarded). Long messages from it are kept
    in files in the folder `spool` (None: in memory). The process ends when its pipe is closed, so also when this
    process is killed.
    """

    def __init__(self, module: str, config: Header, log: Path | None, spool: Path | None = None) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "PYTHON"))}
        environment |= ENVIRONMENT | ({"FLWR_HOME": str(log.parent / ".flwr")} if log is not None else {})
        opened = contextlib.nullcontext(subprocess.DEVNULL) if log is None else log.open("ab")
        with opened as errors:
            self.process = subprocess.Popen(
                [interpreter(), "-P", "-c", BOOTSTRAP, str(MODULES), module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach this process only
            )
        self.spool = spool
        self.failure: OSError | None = None  # why messages are no longer read
        self.received: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        self.send(config)

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while (frame := read_frame(self.process.stdout, self.spool)) is not None:
                self.received.put(frame)
        except OSError as error:  # the disk is full, so that a message cannot be kept
            self.failure = error
        self.received.put(None)

    def send(self, header: Header, blob: Any = b"") -> None:
        """Send one message. Nothing happens if the process has ended; `receive` returns None then."""
        assert self.process.stdin is not None
        with self.lock, contextlib.suppress(BrokenPipeError):
            write_frame(self.process.stdin, header, blob)

    def receive(self, seconds: float | None = None) -> Frame | None:
        """The next message; None if the process has ended. Raises queue.Empty after `seconds` (None: never).

        OSError if a message could not be written to the spool.
        """
        frame = self.received.get(timeout=seconds)
        if frame is None:
            self.received.put(None)
            if self.failure is not None:
                raise self.failure
        return frame

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
