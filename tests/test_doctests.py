"""The examples in docstrings run, in every module that has one."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import fedskew

ROOT = Path(fedskew.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text())
TAUGHT = (  # what people write code with: these must have an example
    *("__init__", "core/method", "core/settings", "core/tensors", "core/training", "core/net", "core/augment"),
    *("data/dataset", "data/split/chain", "data/sources/loading", "data/sources/user_data"),
    *("experiment/config", "experiment/run", "evaluation/figures"),
)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_the_examples_of_a_module_run(path: Path) -> None:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    module = import_module(".".join(part for part in parts if part != "__init__"))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", TAUGHT)
def test_what_people_write_code_with_has_an_example(name: str) -> None:
    assert ROOT / f"{name}.py" in WITH_EXAMPLES
