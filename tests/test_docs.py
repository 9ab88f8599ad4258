"""The documentation site: it builds without a warning and without a network, and nothing is missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedskew
from fedskew.data.split.chain import listing

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_split_is_in_the_gallery() -> None:
    """A split without a picture is one that nobody finds."""
    script = (DOCS / "gallery" / "plot_splits.py").read_text()
    titles = set(re.findall(r"^# %%\n# (\S+)\n# -+$", script, re.MULTILINE))
    assert titles == {name for kind in listing().values() for name in kind}
    shown = "+".join(re.findall(r"^(?:show|look)\(\"([^\"]+)\"", script, re.MULTILINE))
    assert titles <= {step.partition(":")[0] for step in shown.split("+")}


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^\.\. \w+(?::\w+)?:: fedskew\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert listed == set(fedskew.__all__) - {"METHODS"}  # which its text mentions


def test_the_front_page_s_figures_are_those_of_the_results() -> None:
    """The text for those who cannot see the picture says what the picture shows."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import front_picture
    finally:
        sys.path.pop(0)
    readme = (ROOT / "README.md").read_text()
    shared, worst = front_picture.last_rounds("global"), front_picture.last_rounds("worst")

    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.0f}"

    assert f"from {mean(shared['iid'])} to {mean(shared['fedavg'])} %" in readme
    others = [mean(shared[runs]) for _, runs, role in front_picture.GLOBAL if role == "better"]
    assert f"reach {min(others)} to {max(others)} %" in readme
    assert f"from {mean(worst['iid'])} to {mean(worst['fedavg'])} %" in readme
    assert f"training alone has {mean(worst['local'])} %, fine-tuned FedAvg {mean(worst['finetune'])} %" in readme


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """About 25 s of one core, half of it for the gallery. Formulas are MathML, so no script is fetched for them."""
    pytest.importorskip("sphinx_gallery")
    pytest.importorskip("latex2mathml")
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    build = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*build, str(DOCS), str(tmp_path / "site")],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == [], page.name
    assert "<math" in (tmp_path / "site" / "methods" / "fedprox.html").read_text()
    assert "total_variation" in (tmp_path / "site/generated/splits/plot_splits.html").read_text()
