"""Plant faults in the source, one at a time, and see whether the tests notice.

    python scripts/mutate.py                      all faults of scripts/planted.toml
    python scripts/mutate.py --only seed --jobs 2 those whose name or file contains "seed", two at a time

A fault is a table of planted.toml: the file under src/fedskew, the text to replace (`old`, which must occur exactly
once), what to put there (`new`), and the tests that should fail. Each fault is planted in a temporary copy of src;
the working tree is never changed. The tests must pass without any fault, or nothing is learnt: that is checked first.

Prints one line a fault and ends with exit code 1 if one survived, could not be planted, or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("planted.toml")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # under src/fedskew
    old: str
    new: str
    tests: list[str]


def read_faults(only: str = "") -> list[Fault]:
    tables = tomllib.loads(FAULTS.read_text())
    return [Fault(name, **table) for name, table in tables.items() if only in name or only in table["file"]]


def plant(fault: Fault, src: Path) -> None:
    """Change the copy of the source in `src`."""
    path = src / "fedskew" / fault.file
    text = path.read_text()
    if (found := text.count(fault.old)) != 1:
        raise ValueError(f"its text occurs {found} times in {fault.file}, expected once")
    changed = text.replace(fault.old, fault.new)
    compile(changed, fault.file, "exec")  # a fault that is no Python would be noticed by anything
    path.write_text(changed)


def failure(tests: Sequence[str], fault: Fault | None = None) -> str:
    """The first test that fails with the fault planted, '' if none does."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            plant(fault, src)
        environment = os.environ | {"PYTHONPATH": str(src), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not lines:
        raise ValueError(f"the tests could not be run: {(done.stdout + done.stderr)[-300:]}")
    return lines[0].partition(" ")[2].partition(" - ")[0]


def attempt(fault: Fault) -> tuple[Fault, str, str]:
    """(the fault, killed | survived | invalid, by which test or why)."""
    try:
        test = failure(fault.tests, fault)
    except (OSError, SyntaxError, ValueError) as error:
        return fault, "invalid", str(error)
    return fault, "killed" if test else "survived", test or f"{fault.file}; expected a failure in {fault.tests}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", default="", help="faults whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    options = parser.parse_args()
    faults = read_faults(options.only)
    if not faults:
        print(f"no fault's name or file contains {options.only!r}")
        return 1
    if test := failure(sorted({test for fault in faults for test in fault.tests})):
        print(f"without any fault, {test} fails: nothing was planted")
        return 1
    counts = {"killed": 0, "survived": 0, "invalid": 0}
    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, verdict, why in pool.map(attempt, faults):
            counts[verdict] += 1
            print(f"{verdict:9} {fault.name}: {why}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if counts["killed"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
