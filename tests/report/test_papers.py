"""The page of the papers' claims, from kept runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.report.papers import write_page
from fedskew.studies.papers import Cell, write_cell

CLAIMS = """
[FedX]
title = "A paper"
method = "fedx"
setting = "CIFAR-10. Ten clients."
curves = ["avg", "x"]
attempts = ["Another reading of Eq. 2: 61.0."]
claims = [
    {where = "Table 1", claim = "ahead of FedAvg", paper = [70.0, 60.0], method = ["x"], baseline = ["avg"]},
    {where = "Table 2", claim = "with data that nobody has", untested = "ISIC2019 is not available"},
    {where = "Table 3", claim = "cheaper", method = ["later"], baseline = ["avg"]},
]
"""


def kept(name: str, value: float) -> Cell:
    return Cell(
        name=name, method=name, seed=0, command=f"fedskew run --method {name}", commit="c0ffee1234567", date="",
        cpu="a CPU", versions={}, digest="0123456789abcdef99", model_digest="", rounds=8, seconds=120.0, classes=10,
        settings={}, curves={"global": [(i, value + 0.1 * (i % 2)) for i in range(1, 9)]},
    )  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, value in (("avg", 55.0), ("x", 64.0)):
        write_cell(kept(name, value), tmp_path / "results" / "cells")
    (tmp_path / "results" / "claims.toml").write_text(CLAIMS)
    return tmp_path / "results"


def test_the_page_has_every_claim_with_its_verdict_and_every_run_with_its_command(results: Path) -> None:
    page = results.parent / "docs" / "papers.md"
    page.parent.mkdir()
    write_page(results, page)
    text = page.read_text()
    assert "| FedX | 3 | 1 | - | - | 1 | 1 |" in text
    assert "| 70.0 / 60.0 | +10.0 | 64.0 / 55.0 | +9.0 ±" in text
    assert "**reproduced**: within 1.0 points of the paper's gain" in text
    assert "**cannot be tested**: ISIC2019 is not available" in text
    assert "**not run**: waits for later" in text
    assert "| x | x | 0 | `fedskew run --method x` | c0ffee1234 | a CPU | 2 | 0123456789abcdef |" in text
    assert "- Another reading of Eq. 2: 61.0." in text
    assert "papers/fedx.svg" in text
    first = (page.parent / "papers" / "fedx.svg").read_bytes()
    write_page(results, page)
    assert (page.parent / "papers" / "fedx.svg").read_bytes() == first
