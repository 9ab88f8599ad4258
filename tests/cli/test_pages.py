"""Every command and every block of Python in README and docs runs, page by page and from top to bottom.

A comment before a block changes that. `<!-- tested with: run: --rounds 1; compare: --workers 1 -->` adds options to the
commands of the block, `<!-- not run: reason -->` leaves it out.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from fedskew.core.settings import UsageError
from fedskew.deploy.flower_process import interpreter

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {"deployment.md", "results.md"}  # see the test of the tutorial; published tables take hours
BLOCK = re.compile(
    r"(?:<!-- (?P<rule>tested with|not run): (?P<words>.*?) -->\n+)?"
    r"(?:^```(?P<language>\S*)\n(?P<fenced>.*?)^```$|(?P<indented>^    [^\n]*\n(?:^    [^\n]*\n|^\n)*))",
    re.MULTILINE | re.DOTALL,
)


class Step(NamedTuple):
    """One command line, or one block of Python."""

    kind: str  # "run" or "python"
    text: str


def steps(page: str) -> list[Step]:
    """What a page tells its reader to do, in order."""
    found: list[Step] = []
    for block in BLOCK.finditer(page):
        if block["rule"] == "not run":
            continue
        if block["language"] == "python":
            found.append(Step("python", block["fenced"]))
            continue
        more = dict(part.strip().split(": ", 1) for part in (block["words"] or "").split(";") if part.strip())
        for line in (block["fenced"] or block["indented"] or "").splitlines():
            if line.strip().startswith("fedskew "):
                command = " ".join(shlex.quote(word) for word in shlex.split(line, comments=True))
                found.append(Step("run", f"{command} {more.get(command.split()[1], '')}".strip()))
    return found


def pages() -> list[Path]:
    texts = {path: path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
    return [path for path, text in texts.items() if steps(text) and path.name not in ELSEWHERE]


def test_blocks_are_found_with_their_rules() -> None:
    page = (
        "Text\n\n    fedskew run --rounds 2   # short\n    make demo\n\n"
        "<!-- tested with: tune: --budget 1; run: --workers 1 -->\n\n    fedskew run --seed 1\n    fedskew data\n\n"
        "<!-- not run: waits -->\n\n    fedskew watch\n\n```python\nx = 1\n```\n\n```sh\nfedskew models\n```\n"
        "\n```text\nno command\n```\n"
    )
    assert steps(page) == [
        Step("run", "fedskew run --rounds 2"),
        Step("run", "fedskew run --seed 1 --workers 1"),
        Step("run", "fedskew data"),
        Step("python", "x = 1\n"),
        Step("run", "fedskew models"),
    ]


def test_the_pages_that_teach_are_among_those_that_run() -> None:
    wanted = {"README.md", "start.md", "concepts.md", "commands.md", "own-data.md", "own-model.md", "own-method.md"}
    assert wanted | {"use.md", "tables.md", "privacy.md", "public.md"} <= {path.name for path in pages()}


def made_elsewhere(command: list[str], said: str) -> bool:
    """Whether a cell of the board cannot have the same bits, because it was made on another kind of CPU."""
    return command[:2] == ["board", "verify"] and "the CPU is" in said


@pytest.mark.slow
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, fedskew: Any, quick_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look for the module of a class
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for kind, text in steps(path.read_text()):
        if kind == "python":
            exec(compile(text, path.name, "exec"), module.__dict__)
        else:
            command = shlex.split(text)[1:]
            done = fedskew(*command, *(["--workers", "1"] if command[0] == "run" else []))
            assert done.code == 0 or made_elsewhere(command, done.out), (text, done.out, done.err)
    if path.name == "use.md":
        assert (tmp_path / "predictions.csv").read_text().count("\n") == 361
        assert (tmp_path / "va.pt").stat().st_size > 10_000


def test_the_five_lines_need_nothing_of_fedskew() -> None:
    code = steps((DOCS / "use.md").read_text())[2]
    assert code.kind == "python"
    assert "fedskew" not in code.text
    assert len([line for line in code.text.splitlines() if line]) == 5


def test_every_link_from_one_page_to_another_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.md")]:
        text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text):
            path = next(filter(None, target))
            if "://" not in path:
                assert (page.parent / path).exists(), f"{page.name} links to {path}"


def has_flower() -> bool:
    try:
        interpreter()
    except UsageError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_flower(), reason="Flower is not installed (`make test` installs it)")
def test_the_tutorial_of_deployment_runs() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "tutorial.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean over hospitals" in done.stdout
    assert "9 commands within the text" in done.stdout
