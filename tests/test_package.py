"""The package as users get it: built from a clean copy, installed into an empty environment, run elsewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedskew

ROOT = Path(__file__).parents[1]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_written_in_one_place_and_cited() -> None:
    assert "version" in project()["dynamic"]
    assert f"\nversion: {fedskew.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_versions_are_exact_only_where_they_must_be_and_the_tested_ones_are_written_down() -> None:
    """An exact pin in the package would clash with the user's other packages; Flower's internals are the exception."""
    wanted = [
        *project()["dependencies"],
        *(each for extra in project()["optional-dependencies"].values() for each in extra),
    ]
    assert [each for each in wanted if "==" in each] == project()["optional-dependencies"]["flower"]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    tested = {
        *project()["dependencies"],
        *project()["optional-dependencies"]["dev"],
        *project()["optional-dependencies"]["docs"],
    }
    names = {re.split(r"[<>=\[]", each)[0].lower().replace("_", "-") for each in tested} - {"fedskew"}
    assert names <= pinned
    assert "-c constraints.txt" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("package")
    source, out = folder / "source", folder / "out"
    source.mkdir()
    out.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for step, where in (("sdist", source), ("wheel", folder / "unpacked")):
        if step == "wheel":
            with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
                archive.extractall(where, filter="data")
            where = next(where.iterdir())
        code = f"import sys; from setuptools import build_meta as b; b.build_{step}(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    """A file that is missing is noticed by users only: the tests run from the sources."""
    files = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "fedskew").rglob("*") if path.is_file())
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(metadata).decode()
    assert names == expected
    assert f"\nVersion: {fedskew.__version__}\n" in text
    assert "\nRequires-Dist: torch>=2.6\n" in text


@pytest.mark.slow
def test_the_wheel_alone_runs_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """The environment sees the installed dependencies through a .pth file, but not this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(next(built.glob("*.whl")))], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def fedskew_says(*words: str) -> str:
        command = [str(python.parent / "fedskew"), *words]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    where = [str(python), "-c", "import fedskew; print(fedskew.__file__)"]
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(packages))
    assert fedskew_says("--version").strip() == f"fedskew {fedskew.__version__}"
    one = ["run", "--rounds", "1", "--workers", "1"]
    digits = json.loads(fedskew_says(*one, "--json", "--out", "mine"))
    assert digits["metrics"]["global"]["accuracy"] > 0.1
    heart = json.loads(fedskew_says(*one, "--json", "--data", "heart", "--split", "natural"))
    assert heart["metrics"]["clients"]["global"]["mean"] > 0
    assert "fedavg" in fedskew_says("methods")
    assert "total variation" in fedskew_says("split", "dirichlet:alpha=0.3,clients=5", "--png", "split.png").lower()
    assert "fedmr-table1" in fedskew_says("table", "list")
    fedskew_says("report", "mine", "--out", "page.html")
    assert (elsewhere / "page.html").stat().st_size > 10_000


def test_the_version_can_be_read_without_importing_the_package() -> None:
    """Building must not need torch: setuptools reads a plain assignment from the source."""
    tree = ast.parse(Path(fedskew.__file__).read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__version__")
    assert isinstance(value, ast.Constant)
