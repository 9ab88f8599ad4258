"""The commands and the Python on the pages about models and tables run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def steps(page: str) -> list[tuple[str, str]]:
    """The page's commands ("run", line) and blocks of Python ("python", code), in order."""
    found: list[tuple[str, str]] = []
    for number, part in enumerate(page.split("```")):
        if number % 2:
            assert part.startswith("python\n")
            found.append(("python", part.removeprefix("python\n")))
        else:
            found += [("run", line.strip()) for line in part.splitlines() if line.startswith("    fedskew ")]
    return found


@pytest.mark.slow  # exports twice
@pytest.mark.parametrize(("page", "count"), [("use.md", 10), ("tables.md", 1), ("privacy.md", 4)])
def test_a_page_runs_from_top_to_bottom(
    page: str, count: int, tmp_path: Path, fedskew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = steps((DOCS / page).read_text())
    assert len(found) == count
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for kind, text in found:
        if kind == "python":
            exec(compile(text, page, "exec"), module.__dict__)
        else:
            done = fedskew(*shlex.split(text)[1:], *(["--workers", "1"] if " run " in text else []))
            assert done.code == 0, (text, done.err)
    if page == "use.md":
        assert (tmp_path / "predictions.csv").read_text().count("\n") == 361
        assert (tmp_path / "va.pt").stat().st_size > 10_000


def test_the_five_lines_need_nothing_of_fedskew() -> None:
    code = steps((DOCS / "use.md").read_text())[2]
    assert code[0] == "python"
    assert "fedskew" not in code[1]
    assert len([line for line in code[1].splitlines() if line]) == 5
