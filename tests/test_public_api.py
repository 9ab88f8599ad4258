"""What `import fedskew` offers: listed, documented, and known to a type checker."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedskew


def test_dir_lists_the_public_names_and_every_method() -> None:
    names = dir(fedskew)
    assert {"run", "resume", "read_run", "Experiment", "Method", "METHODS", "__version__"} <= set(names)
    assert {kind.__name__ for kind in fedskew.METHODS.values()} <= set(names)
    assert all(hasattr(fedskew, name) for name in names)


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    undocumented = [
        name
        for name in dir(fedskew)
        if (inspect.isclass(value := getattr(fedskew, name)) or inspect.isfunction(value))
        and not (value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__)
    ]
    assert undocumented == []


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SCAFLOD'"):
        fedskew.SCAFLOD  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow  # mypy reads the package
def test_a_type_checker_rejects_a_misspelt_name(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text("import fedskew\n\nfedskew.SCAFFOLD()\nfedskew.SCAFLOD()\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(tmp_path / "use.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert "use.py:4: error" in done.stdout
    assert "use.py:3" not in done.stdout
