"""The board's page: what it holds, that names are only text, and that its filters and its sorting work."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.report.board import board_page, shade, write_board
from fedskew.studies.board.evidence import Task
from helpers.boards import made_task
from helpers.browser import browser

HOSTILE = '<img src=x onerror="alert(1)">'


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text in table cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "td":
            self.cells.append(data)

    def rows(self) -> list[dict[str, str | None]]:
        """The attributes of the tables' rows, without those of heads."""
        return [attributes for tag, attributes in self.found if tag == "tr" and "data-public" in attributes]


def test_rows_say_what_the_filters_ask_for_and_cells_have_their_commands() -> None:
    page = board_page([made_task("t1"), made_task("t2", lead=-0.2)])
    elements = Elements(page)
    rows = elements.rows()
    assert len(rows) == 6 * 4, "two heat maps and two tables of six methods"
    assert {"data-public", "data-sums", "data-state"} <= rows[0].keys()
    assert sum(row["data-public"] == "yes" for row in rows) == 4
    boxes = [a["value"] for tag, a in elements.found if tag == "input"]
    assert boxes == ["without-public", "only-sums", "without-state"]
    assert "fedskew board verify t1/fedprox/2  dddddddddddddddd" in page
    assert "+5.0" in elements.cells
    assert "1 / 0 / 1" in elements.cells, "fedprox won t1 and lost t2"


def test_the_page_asks_for_nothing_from_outside() -> None:
    elements = Elements(board_page([made_task()]))
    for tag, attributes in elements.found:
        for name in ("src", "href", "action", "data"):
            assert not (attributes.get(name) or "").startswith(("http", "//")), (tag, attributes)


def test_names_are_only_text() -> None:
    task = made_task()
    rows = [msgspec.structs.replace(row, method=HOSTILE, note=HOSTILE, rates={HOSTILE: 0.5}) for row in task.rows[:1]]
    hostile = msgspec.structs.replace(
        task,
        **dict.fromkeys(("name", "title", "why", "commit", "cpu", "unsettled"), HOSTILE),
        rows=[*rows, *task.rows[1:]],
        settings={"data": HOSTILE, "split": HOSTILE, "model": "</script><script>alert(1)</script>"},
        missing=[HOSTILE],
    )
    page = board_page([hostile])
    assert "<img" not in page
    assert "<script>alert" not in page
    assert page.count("</script>") == 3
    assert not any(name.startswith("on") for _, attributes in Elements(page).found for name in attributes)


def test_a_task_whose_fedavg_has_not_converged_is_marked_and_has_no_colours() -> None:
    page = board_page([made_task(curve=(0.2, 0.3, 0.4, 0.5))])
    assert "still rises by 10.0 points" in page
    assert "unranked" in page
    assert not any("more-" in (a.get("class") or "") for tag, a in Elements(page).found if tag == "td")


def test_a_task_that_is_not_whole_says_so() -> None:
    assert "t9 is not whole: fedmr not finished." in board_page(
        [msgspec.structs.replace(made_task(), missing=["fedmr"])]
    )


def test_colours_follow_the_sign_and_size_of_a_difference() -> None:
    assert [shade(points) for points in (-30, -5, -0.6, 0.0, 0.49, 0.5, 2.5, 9.9)] == [
        *("less-4", "less-3", "less-1", "even", "even", "more-1", "more-2", "more-3")
    ]


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_board([made_task()], tmp_path / "file" / "board.html")


@pytest.mark.slow
def test_filters_hide_rows_and_heads_sort_them_in_a_browser(tmp_path: Path) -> None:
    tasks: list[Task] = [made_task("t1"), made_task("t2", lead=-0.2)]
    write_board(tasks, tmp_path / "board.html")
    with browser(tmp_path / "profile") as driver:
        driver.get((tmp_path / "board.html").as_uri())

        def shown() -> list[str]:
            script = """return [...document.querySelectorAll("#t1 .board tbody tr")]
                .filter(row => row.offsetParent !== null).map(row => row.cells[0].textContent)"""
            return list(driver.execute_script(script))

        def click(where: str) -> Any:
            return driver.execute_script("document.querySelector(arguments[0]).click()", where)

        assert shown()[0] == "fedprox"
        click("input[value=without-public]")
        assert "ratioloss" not in shown()
        click("input[value=only-sums]")
        assert "fedgen" not in shown()
        click("input[value=without-state]")
        assert shown() == ["fedprox", "fedavg"]
        click("input[value=without-public]")
        click("input[value=only-sums]")
        click("input[value=without-state]")
        assert len(shown()) == 6
        click("#t1 .board th:nth-child(2) button")
        assert shown()[-1] == "fedprox" or shown()[0] == "fedprox"
        click("#t1 .board th:nth-child(1) button")
        assert shown() == sorted(shown())
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_method_that_failed_with_a_seed_shows_no_lead() -> None:
    """The seeds that finished may look good; a run that diverges is a loss all the same."""
    task = made_task()
    failed = [
        msgspec.structs.replace(row, failed=1, note="the loss was not finite", outcome="loss")
        if row.method == "fedprox"
        else row
        for row in task.rows
    ]
    page = board_page([msgspec.structs.replace(task, rows=failed)])
    heat = page.partition("Clients&#x27; own models")[0]
    assert "1 of 4 seeds: the loss was not finite" in heat
    assert "+5.0" not in heat
