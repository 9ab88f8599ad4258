"""Fixtures and settings that all tests share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start: sites use one thread, tests run side by side.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from fedskew.cli.main import main
from fedskew.data.sources.catalogue import SOURCES, Found
from helpers.own_code import MY
from helpers.processes import quick_context
from helpers.recipes import SMALL

# a test must not fail because the machine is busy
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

read_digits = cache(SOURCES["digits"].find)


def digits_again(folder: Path) -> Found | None:
    """Copies of the digits, whose text file is read once a session: a world of a test costs half as much."""
    found = read_digits(Path())
    return found and (found[0], {name: array.copy() for name, array in found[1].items()})


SOURCES["digits"] = replace(SOURCES["digits"], find=digits_again)


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


@pytest.fixture
def fedskew(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "160")
    before = signal.getsignal(signal.SIGTERM)

    def call(*words: str) -> Said:
        code = 0
        capfd.readouterr()
        try:
            main(list(words))
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
        caught = capfd.readouterr()
        return Said(code, caught.out, caught.err)

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes of a simulation start quickly: see `quick_context`."""
    context = quick_context()
    monkeypatch.setattr("fedskew.federation.simulate.processes.multiprocessing.get_context", lambda kind: context)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, so that sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recipe of a small published table, as a file."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's file my.py in it."""
    (tmp_path / "my.py").write_text(MY)
    monkeypatch.chdir(tmp_path)
    return tmp_path
