"""The pages of methods: formulas that can be drawn, rows of the board, and files in docs that are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedskew.methods import REGISTRY
from fedskew.report.method_docs import entry
from fedskew.report.method_pages import board_rows, display, method_page, pages
from fedskew.studies.board.evidence import Row, Task

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_has_a_formula_that_can_be_drawn(name: str) -> None:
    converter = pytest.importorskip("latex2mathml.converter")
    formula = REGISTRY[name].formula
    assert formula
    assert formula.count("{") == formula.count("}")
    drawn = converter.convert(display(formula).strip("$\n"), display="block")
    assert "\\" not in drawn, "a command that the converter does not know is printed as it is"
    lines = re.split(r"\\\\", formula)
    assert len(lines) == 1 or all("&" in line for line in lines)
    assert "&</mi>" not in drawn, "an & outside an environment that aligns is printed as it is"
    assert drawn.count("<mtr>") == (len(lines) if len(lines) > 1 else 0)


def test_the_pages_in_docs_are_up_to_date() -> None:
    for name, text in pages().items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is out of date: run make docs"
    assert {path.stem for path in (DOCS / "methods").glob("*.md")} == set(REGISTRY)


def test_a_page_has_the_formula_the_settings_the_leaks_and_the_cost() -> None:
    text = method_page(entry("fedprox"), [])
    assert "\n$$\nh_k(w; w_t) = F_k(w) + \\frac{\\mu}{2} \\lVert w - w_t \\rVert^2\n$$\n" in text
    assert "|mu|`0.01`|Weight of \\|w - w_t\\|^2 / 2 in each client's loss; 0 gives FedAvg.|" in text
    assert "The server needs only sums over clients." in text
    assert "- per client and round: - bytes down, - bytes up" not in text
    assert "board" not in text


def test_a_page_shows_the_board_s_rows_of_its_own_method_only() -> None:
    rows = [
        Row(
            method="fedprox:mu=0.1", lr=0.03, seeds=5, value=0.71, over=0.02, margin=0.01, own_over=0.1, own_margin=0.2
        ),
        Row(method="fedproxy", lr=0.03, seeds=5, value=0.5),
        Row(method="fedavg", lr=0.1, seeds=4, failed=1, value=None),
    ]
    task = Task(name="t1", title="label skew", goal="global", skew={}, commit="c", cpu="x", rows=rows)
    (shown,) = board_rows("fedprox", [task])
    assert shown[0] == "t1: label skew (mu=0.1)"
    assert shown[2:] == ["71.0", "**+2.0 ± 1.0**", "+10.0 ± 20.0", "0.03", "5"]
    assert "|t1: label skew (mu=0.1)|" in method_page(entry("fedprox"), [task])
    (failed,) = board_rows("fedavg", [task])
    assert failed[2:] == ["-", "-", "-", "0.1", "4, 1 failed"]


def test_a_page_claims_no_lead_where_fedavg_has_not_converged() -> None:
    row = Row(method="fedprox", lr=0.03, seeds=5, value=0.71, over=0.02, margin=0.01)
    task = Task(name="t1", title="skew", goal="global", skew={}, commit="", cpu="", rows=[row], unsettled="rises")
    (shown,) = board_rows("fedprox", [task])
    assert shown[3:5] == ["not ranked: FedAvg has not converged"] * 2
