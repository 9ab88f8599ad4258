"""Which code made a result, and on which kind of CPU."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]  # of a working copy


def commit() -> str:
    """The commit of the working copy this package is in; "" if it is in none."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return described.stdout.strip() if described.returncode == 0 else ""


@cache
def this_commit() -> str:
    """The commit when this process first asked for it, which is the one whose code it runs."""
    return commit()


@cache
def this_cpu() -> str:
    """The kind of CPU: bits agree between machines of one kind only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return model or platform.processor() or platform.machine()
