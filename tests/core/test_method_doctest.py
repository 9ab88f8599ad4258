"""The examples in docstrings of public modules run and print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from fedskew.core import method, settings


@pytest.mark.parametrize("module", [method, settings], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
