"""Flower in a process of its own, in its own environment if need be, and the pipe to it."""

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
from fedskew.deploy.flower.frames import Header, read_frame, write_frame

FLOWER = "1.41.0"  # as in pyproject.toml
LAST = 5.0  # seconds a child has to end
HERE = Path(__file__).parent / "flower"
# the modules there import each other relatively; the package they are in must not be imported (it needs torch)
START = (
    "import sys, types; package = types.ModuleType('carried'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['carried'] = package; import importlib; importlib.import_module('carried.' + sys.argv[2]).main()"
)
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def interpreter() -> str:
    """The Python that has Flower: the one FEDSKEW_FLOWER names, this one, or the one in <this environment>/flower."""
    beside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    if given := os.environ.get("FEDSKEW_FLOWER"):
        python = Path(given).expanduser() / beside
        if not python.exists():
            raise UsageError(f"FEDSKEW_FLOWER={given} will not do: there is no {beside} in it; name an environment.")
        return str(python)
    if importlib.util.find_spec("flwr") is not None:
        if (found := version("flwr")) != FLOWER:
            raise UsageError(f"flwr {found} is installed, but {FLOWER} is needed: pip install 'fedskew[flower]'.")
        return sys.executable
    own = Path(sys.prefix) / "flower" / beside
    if own.exists():
        return str(own)
    raise UsageError(
        "this needs Flower, which is not installed: pip install 'fedskew[flower]', or install "
        f"flwr=={FLOWER} in an environment of its own and name it in FEDSKEW_FLOWER."
    )


class Child:
    """A role of Flower's (link, carrier, keys), started with a config; what it tells comes through `hear`.

    It ends when this process does, however that ends: its pipe is then closed.
    """

    def __init__(self, role: str, config: Header, log: Path | None) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "PYTHON"))}
        environment |= QUIET | ({"FLWR_HOME": str(log.parent / ".flwr")} if log is not None else {})
        opened = contextlib.nullcontext(subprocess.DEVNULL) if log is None else log.open("ab")
        with opened as errors:
            self.process = subprocess.Popen(
                [interpreter(), "-P", "-c", START, str(HERE), role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self.told: queue.SimpleQueue[tuple[Header, bytes] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        self.tell(config)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        while (frame := read_frame(self.process.stdout)) is not None:
            self.told.put(frame)
        self.told.put(None)

    def tell(self, header: Header, blob: Any = b"") -> None:
        assert self.process.stdin is not None
        with self.lock, contextlib.suppress(BrokenPipeError):  # its end is heard of through `hear`
            write_frame(self.process.stdin, header, blob)

    def hear(self, seconds: float | None = None) -> tuple[Header, bytes] | None:
        """What it tells next; None when it has ended. Raises queue.Empty when there is nothing for so long."""
        frame = self.told.get(timeout=seconds)
        if frame is None:
            self.told.put(None)
        return frame

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=LAST)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
