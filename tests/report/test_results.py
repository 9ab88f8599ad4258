"""Finished tables as text: numbers, sentences, and the page docs/results.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedskew.report.results import lines, markdown, outdated, overview, sentences
from fedskew.studies.tables.finished import FinishedTable, finish, read_tables
from fedskew.studies.tables.recipe import Recipe, load_recipe
from fedskew.studies.tables.running import Work, plan
from fedskew.studies.tables.verdicts import Cell

ROOT = Path(__file__).parents[2]


def a_cell(column: str, ours: float | None, paper: float | None) -> Cell:
    late = None if ours is None else ours - 0.5
    return Cell("skewed", column, ours, 0.5, paper, (0, 1), last_five=late, unsettled="")


def table_of(recipe: Recipe, works: list[Work], scale: Any, ours: dict[str, float | None]) -> FinishedTable:
    paper = {"FedAvg": 60.0, "FedProx": 70.0}
    return finish(recipe, scale, works, [a_cell(c, v, paper[c]) for c, v in ours.items()])


def test_the_reduced_scale_never_shows_the_paper_s_own_number(small: Path) -> None:
    recipe = load_recipe(str(small))
    works = plan(recipe, "reduced", [], ["FedAvg", "FedProx"], [], Path("x"))
    failed = table_of(recipe, works, "reduced", {"FedAvg": 30.0, "FedProx": None})
    failed.cells[1] = replace(failed.cells[1], verdict="diverged")
    assert overview([failed])[1][4:] == ["-", "+10.00", "diverged", "0 of 1"]
    page = markdown([table_of(recipe, works, "reduced", {"FedAvg": 30.0, "FedProx": 33.0})])
    assert "| A small table, in % | reduced | skewed | FedProx | +3.00 | +10.00 | gain kept | 1 of 1 |" in page
    assert "70.00" not in page
    assert "60.00" not in page
    assert "| skewed | FedProx | 33.00 ±0.50 | 32.50 | +3.00 | +10.00 | gain kept |" in page
    assert "Reduced: fewer samples, one seed." in page
    assert (
        "- skewed: order of the methods kept (1 of 1 pairs); FedProx over FedAvg +3.00 points, in the paper +10.00"
        in page
    )


def test_the_paper_s_scale_shows_ours_beside_the_paper_s(small: Path) -> None:
    recipe = load_recipe(str(small))
    works = plan(recipe, "paper", ["skewed"], ["FedAvg", "FedProx"], [], Path("x"))
    made = table_of(recipe, works, "paper", {"FedAvg": 61.5, "FedProx": 50.0})
    assert lines(made)[0] == ["skewed", "FedAvg", "61.50 ±0.50", "61.00", "60.00", "+1.50", "within"]
    assert sentences(made)[0] == "1 of 2 values within 5 points of the paper's"
    assert "order of the methods not kept (0 of 1 pairs)" in sentences(made)[1]
    assert made.settings["rounds"] == 2
    assert made.methods["FedProx"] == {"name": "fedprox", "mu": 0.1}
    assert len(made.runs) == 4


@pytest.mark.parametrize(("tolerance", "shown"), [(5, "60.00"), (0.05, "60.00"), (0.001, "60.000"), (2e-4, "60.0000")])
def test_a_number_has_as_many_decimals_as_the_tolerance_needs(small: Path, tolerance: float, shown: str) -> None:
    recipe = replace(load_recipe(str(small)), tolerance=tolerance)
    works = plan(recipe, "paper", ["skewed"], ["FedAvg"], [0], Path("x"))
    assert lines(table_of(recipe, works, "paper", {"FedAvg": 61.5}))[0][4] == shown
    assert (
        lines(table_of(recipe, works, "paper", {"FedAvg": 60 - 1e-9}))[0][5] == f"+0.{'0' * (len(shown) - 3)}"
    )  # never -0


def test_a_table_says_which_methods_were_run_with_other_settings_than_today_s(small: Path) -> None:
    """Planted: a stored table whose FedProx had another weight, and one column that the recipe has no more."""
    recipe = load_recipe("fedmr-table1")
    row = next(iter(recipe.parsed_rows))
    today = {c: recipe.experiments(row, c, 0, "paper")[0].as_dict()["method"] for c in ("FedAvg", "FedProx")}
    cells = [replace(a_cell(column, 60.0, 60.0), row=row) for column in ("FedAvg", "FedProx", "gone")]
    made = load_recipe(str(small))
    works = plan(made, "paper", ["skewed"], ["FedAvg", "FedProx"], [], Path("x"))
    table = table_of(made, works, "paper", {"FedAvg": 60.0, "FedProx": 60.0})
    assert outdated(table) == []  # not one of our recipes
    rows = {row: next(iter(table.rows.values()))}
    table = msgspec.structs.replace(table, table="fedmr-table1", cells=cells[:2], rows=rows, methods=today)
    assert outdated(table) == []
    changed = today | {"FedProx": today["FedProx"] | {"mu": 7.0}, "gone": {"name": "fedavg"}}
    table = msgspec.structs.replace(table, cells=cells, methods=changed)
    assert outdated(table) == ["FedProx", "gone"]
    assert "**Of former settings, not run again with today's: FedProx, gone.**" in markdown([table])


def test_the_page_of_results_is_fresh() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert markdown(read_tables(ROOT / "results")) == page, "run `make results`"
