"""The documentation site: it builds without a warning and without a network, and nothing is missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import board_picture
import front_picture
import msgspec
import pytest

import fedskew
from fedskew.cli.main import app
from fedskew.data.split.chain import listing
from fedskew.report.board import board_page
from fedskew.studies.board.evidence import Task, shipped
from helpers.boards import made_task

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


def test_every_command_is_on_the_page_of_commands() -> None:
    shown = re.findall(r"^    fedskew (.*)", (DOCS / "commands.md").read_text(), re.MULTILINE)
    named = {word for line in shown for word in line.partition("  ")[0].replace("|", " ").split()}
    assert {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    } <= named
    assert {group.name for group in app.registered_groups} <= named


def test_the_front_page_s_figures_are_those_of_the_results() -> None:
    """The text for those who cannot see the picture says what the picture shows."""
    readme = (ROOT / "README.md").read_text()
    shared, worst = front_picture.global_models(), front_picture.own_models()
    even, skewed, *better = (f"{bar.mean:.0f}" for bar in shared)
    assert f"global model from {even} to {skewed} %" in readme
    named = [bar.label for bar in shared[2:]]
    words = f"{', '.join(named[:-1])} and {named[-1]} reach {min(better)} to {max(better)} % on average"
    assert words in readme
    own = {bar.label: f"{bar.mean:.0f}" for bar in worst}
    assert f"falls from {own['FedAvg, no skew']} to {own['FedAvg']} %" in readme
    assert f"no federation has {own['no federation']} %, fine-tuned FedAvg {own['FedAvg, fine-tuned']} %" in readme


def test_the_front_picture_rests_on_a_baseline_that_has_converged() -> None:
    even, skewed = front_picture.tasks()
    assert even.ranked
    assert skewed.ranked
    assert even.settings["model"] == skewed.settings["model"]
    assert even.settings["data"] == skewed.settings["data"]


@pytest.mark.parametrize("name", [f"front-{kind}{look}" for kind in ("", "narrow-") for look in ("light", "dark")])
def test_the_front_picture_is_what_the_evidence_says(name: str, tmp_path: Path) -> None:
    look = front_picture.LOOKS[name.rpartition("-")[2]]
    front_picture.draw(look, tmp_path / "made.svg", narrow="narrow" in name)
    assert (tmp_path / "made.svg").read_text() == (DOCS / f"{name}.svg").read_text(), "run scripts/front_picture.py"


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_board_s_picture_is_what_the_evidence_says(look: str) -> None:
    """After a change of the evidence: `make results`."""
    drawn = board_picture.draw(shipped(), board_picture.LOOKS[look])
    assert drawn == (DOCS / f"board-{look}.svg").read_text(), "run `python scripts/board_picture.py`"


def test_the_board_s_page_and_the_words_of_its_picture_are_what_the_evidence_says() -> None:
    tasks, readme = shipped(), (ROOT / "README.md").read_text()
    assert escape(board_picture.about(tasks)) in readme
    assert board_picture.in_readme(readme, tasks) == readme
    now, kept = contents(board_page(tasks)), contents((DOCS / "board.html").read_text())
    assert now == kept, "run `fedskew board page`"


def contents(page: str) -> str:
    """What a page says: all but its styles and its code."""
    return re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)


def made_up() -> list[Task]:
    """A task, one whose FedAvg still rises, and one without fedgen on which scaffold failed."""
    flat, rising, part = made_task("t1"), made_task("t2", curve=(0.2, 0.3, 0.4, 0.5)), made_task("t3", lead=-0.2)
    change = msgspec.structs.replace
    rows = [
        change(row, seeds=0, failed=3, value=None, values={}, over=None, outcome="loss")
        if row.method == "scaffold"
        else row
        for row in part.rows
        if row.method != "fedgen"
    ]
    return [flat, rising, change(part, rows=rows, missing=["fedgen"])]


def test_the_picture_ranks_nothing_where_fedavg_rises_and_hides_no_failure() -> None:
    tasks = made_up()
    assert board_picture.cell(tasks[0], "fedprox", False) == ("+5.0", "more-3", True)
    assert board_picture.cell(tasks[0], "scaffold", False)[2] is False, "its interval includes 0"
    assert board_picture.cell(tasks[1], "fedprox", False) == ("", "unranked", False)
    assert board_picture.cell(tasks[2], "scaffold", False) == ("failed", "less-4", True)
    assert board_picture.cell(tasks[2], "fedgen", False) == ("", "", False)
    picture = board_picture.draw(tasks, board_picture.LOOKS["light"])
    assert "not ranked, FedAvg has not converged (t2)" in picture
    assert "not finished (t3)" in picture
    assert "ahead of tuned FedAvg more often than behind: none." in board_picture.about(tasks)


def test_the_picture_keeps_public_data_and_controls_apart() -> None:
    found = {group.title: group.methods for group in board_picture.groups(made_up())}
    assert found["global model"][0] == "fedavg"
    assert found["public data on the server"] == ["ratioloss"]
    assert found["no federation"] == ["local"]  # in this made-up task it has a value
    assert "ratioloss" not in found["global model"]


@pytest.mark.parametrize("count", range(1, 8))
def test_the_picture_shows_every_method_once_and_stays_narrow_with_any_number_of_tasks(count: int) -> None:
    shown = [msgspec.structs.replace(task, name=f"t{i}") for i, task in enumerate(shipped()[:1] * count)]
    picture = ElementTree.fromstring(board_picture.draw(shown, board_picture.LOOKS["dark"]))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert float(picture.attrib["width"]) == board_picture.WIDTH
    for row in shown[0].rows:
        assert texts.count(board_picture.short(row.method)) == 1, row.method
    for element in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(element.get("x", 0)) + float(element.attrib["width"]) <= board_picture.WIDTH


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
