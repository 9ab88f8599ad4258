"""Every script and the notebook in examples/ run as they stand, in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(script: Path, tmp_path: Path) -> None:
    source = os.pathsep.join(filter(None, [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken" not in done.stdout
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are plain Python, so no Jupyter is needed; three seeds and ten rounds are shortened to two and two."""
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 5
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")  # none to go out of date
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": "notebook"}
    for text in code:
        exec(
            compile(text.replace("rounds=10", "rounds=2").replace("range(3)", "range(2)"), "first_steps", "exec"), names
        )
    assert list(names["table"]) == ["FedAvg, no skew", "FedAvg", "SCAFFOLD", "FedCD"]


def test_the_list_of_examples_is_complete() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for script in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"]({script.name})" in listed
