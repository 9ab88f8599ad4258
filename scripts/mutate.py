"""Plant faults in the source, one at a time, and see whether the tests notice.

    python scripts/mutate.py                      all faults of scripts/planted.toml
    python scripts/mutate.py --only seed --jobs 2 those whose name or file contains "seed", two at a time

A fault is a table of planted.toml: the file under src/fedskew, the text to replace (`old`, which must occur exactly
once), what to put there (`new`), and the tests that should fail. Each fault is planted in a temporary copy of src;
the working tree is never changed. The tests run until the first one fails, those that are about the fault first. At
the end, every test that failed runs without any fault: one that fails then too has shown nothing.

Prints one line a fault and ends with exit code 1 if one survived, could not be planted, or its test fails without it.
Tests run in forks of one process that has imported torch, which takes longer than most tests.
"""

from __future__ import annotations

import argparse
import atexit
import compileall
import importlib
import inspect
import os
import re
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("planted.toml")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # under src/fedskew
    old: str
    new: str
    tests: list[str]

    def words(self) -> set[str]:
        """Words of its name and text, by which tests that are about it are recognised."""
        return set(re.findall(r"[a-z]{3,}", f"{self.name} {self.old} {self.new}".lower()))


class AboutFirst:
    """A plugin of pytest: quick tests before slow ones, and first those that share words with the fault."""

    def __init__(self, words: set[str]) -> None:
        self.words = words

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, -self.shared(item)))

    def shared(self, item: Any) -> int:
        """How many words the test shares with the fault; one in its name counts for three."""
        name, source = item.name.lower(), inspect.getsource(item.function).lower()
        return sum(2 * (word in name) + (word in source) for word in self.words)


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
    path.unlink()  # the other copies are links to the same file
    path.write_text(changed)


def import_once() -> None:
    """Import what takes long before the forks: packages that fedskew and its tests need, none of their modules."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as in tests/conftest.py: torch reads it when it is imported
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("torch", "torch.testing", "sklearn.datasets", "hypothesis.strategies", "pytest", "msgspec", "typer"):
        importlib.import_module(name)


def run_tests(src: Path, tests: Sequence[str], words: set[str], *options: str) -> int:
    """Run the tests of the working tree with the package in `src`; returns pytest's exit code."""
    import pytest

    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(src)  # for processes that tests start
    sys.path.insert(0, str(src))
    import fedskew

    if not Path(fedskew.__file__).is_relative_to(src):
        raise ImportError(f"the tests would use {fedskew.__file__}")
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    return int(pytest.main(arguments, plugins=[AboutFirst(words)]))


def fork(src: Path, tests: Sequence[str], words: set[str], *options: str) -> int:
    """Start `run_tests` in a process of its own, which prints to a file beside `src`; returns its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        with open(src.parent / "output", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = run_tests(src, tests, words, *options)
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def failures(code: int, output: str) -> list[str]:
    """The tests that failed, by what pytest printed and its exit code."""
    if code == 0:
        return []
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code != 1 or not lines:
        raise ValueError(f"the tests could not be run: {output[-300:]}")
    return [line.partition(" ")[2].partition(" - ")[0] for line in lines]


def attempts(faults: Sequence[Fault], base: Path, jobs: int) -> Iterator[tuple[Fault, str, str]]:
    """For each fault: (it, killed | survived | invalid, by which test or why)."""
    waiting, running = list(faults), dict[int, tuple[Fault, Path]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            folder = base.parent / fault.name
            shutil.copytree(base, folder / "src", copy_function=os.link)
            try:
                plant(fault, folder / "src")
            except (OSError, SyntaxError, ValueError) as error:
                yield fault, "invalid", str(error)
                continue
            running[fork(folder / "src", fault.tests, fault.words(), "-x")] = fault, folder
        if running:
            pid, status = os.wait()
            fault, folder = running.pop(pid)
            try:
                failed = failures(os.waitstatus_to_exitcode(status), (folder / "output").read_text())
            except ValueError as error:
                yield fault, "invalid", str(error)
            else:
                why = failed[0] if failed else f"{fault.file}; expected a failure in {fault.tests}"
                yield fault, "killed" if failed else "survived", why
            shutil.rmtree(folder)


def failing_anyway(tests: Sequence[str], base: Path) -> list[str]:
    """Those of the tests that fail without any fault."""
    if not tests:
        return []
    _, status = os.waitpid(fork(base, tests, set()), 0)
    return failures(os.waitstatus_to_exitcode(status), (base.parent / "output").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", default="", help="faults whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    options = parser.parse_args()
    faults = read_faults(options.only)
    if not faults:
        print(f"no fault's name or file contains {options.only!r}")
        return 1
    import_once()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # no TemporaryDirectory: the first fork to end would remove it
    try:
        base = folder / "src"
        shutil.copytree(ROOT / "src", base, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(base, quiet=1)
        found = []
        for fault, verdict, why in attempts(faults, base, options.jobs):
            found.append((verdict, why))
            print(f"{verdict:9} {fault.name}: {why}", flush=True)
        anyway = failing_anyway(sorted({why for verdict, why in found if verdict == "killed"}), base)
    finally:
        shutil.rmtree(folder)
    for test in anyway:
        print(f"without any fault, {test} fails too: a fault that it killed does not count")
    verdicts = ["invalid" if why in anyway else verdict for verdict, why in found]
    print(", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("killed", "survived", "invalid")))
    return 0 if verdicts.count("killed") == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
