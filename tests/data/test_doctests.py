"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "core.augment",
    "core.net",
    "core.tensors",
    "core.training",
    "data.dataset",
    "data.sources.loading",
    "data.sources.user_data",
    "data.split.chain",
    "data.split.skew",
    "models",
    "models.net",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    result = doctest.testmod(import_module(f"fedskew.{name}"))
    assert result.attempted > 0, "the module has no example"
    assert result.failed == 0
