"""The suite itself: tests use one thread each, and nothing of one test module is used by another."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import torch

TESTS = Path(__file__).parent


def test_torch_uses_one_thread_here_and_in_processes_that_tests_start() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"  # which a process inherits


def test_no_test_module_imports_another() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert ".test_" not in f".{node.module}", f"{path} imports from {node.module}"
