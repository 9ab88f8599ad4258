"""The suite itself, and what must follow when a file of the package moves: planted faults and the design page."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import torch
from hypothesis import settings

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "fedskew"


def test_torch_uses_one_thread_here_and_in_processes_that_tests_start() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"  # which a process inherits


def test_no_test_fails_because_the_machine_is_busy() -> None:
    """By default Hypothesis fails a test whose example takes more than 200 ms."""
    assert settings().deadline is None


def test_no_test_module_imports_another() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert ".test_" not in f".{node.module}", f"{path} imports from {node.module}"


def test_every_planted_fault_can_be_planted() -> None:
    """A fault whose text is no longer in its file, or whose tests are gone, says nothing about the suite."""
    for name, fault in tomllib.loads((ROOT / "scripts" / "planted.toml").read_text()).items():
        text = (PACKAGE / fault["file"]).read_text()
        assert text.count(fault["old"]) == 1, name
        compile(text.replace(fault["old"], fault["new"]), name, "exec")
        assert all((ROOT / test.partition("::")[0]).exists() for test in fault["tests"]), name


def test_every_file_that_the_design_page_names_exists() -> None:
    named = re.findall(r"`(\w+/[\w/]*(?:\.\w+)?)`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 30
    assert [name for name in named if not (PACKAGE / name).exists()] == []
