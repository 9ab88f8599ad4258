"""The report's HTML file: text and tables, the charts' data, and the library that draws them, in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedskew.core.settings import library
from fedskew.report.charts import Chart

TEMPLATE = Path(__file__).with_name("page.html")


class Page:
    """A page that is being written: pieces of HTML in order, and the charts they refer to."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.charts: dict[str, Chart] = {}

    def add(self, html: str) -> None:
        """Append a piece of HTML."""
        self.pieces.append(html)

    def add_chart(self, chart: Chart) -> None:
        """Append a chart with its title; the page draws it when it is opened."""
        name = f"chart-{len(self.charts)}"
        self.charts[name] = chart
        title = escape(chart["title"])
        box = f'<div class="chart" id="{name}" role="img" aria-label="{title}"></div>'
        self.add(f"<figure><h3>{title}</h3>{box}</figure>")

    def html(self, title: str) -> str:
        """The whole file: the template with the pieces, the charts and plotly.js filled in."""
        parts = {
            "title": escape(title),
            "body": "\n".join(self.pieces),
            "library": library("plotly.offline", "report").get_plotlyjs(),
            "figures": json.dumps(self.charts).replace("</", "<\\/"),
        }
        page = TEMPLATE.read_text()
        for name, text in parts.items():
            page = page.replace("{{" + name + "}}", text, 1)
        return page


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    best: Sequence[Sequence[bool]] = (),
    text_last: bool = False,
) -> str:
    """A table as HTML. `best` marks cells to print bold; `text_last` aligns the last column as text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for i, row in enumerate(rows):
        marks = best[i] if best else [False] * len(row)
        cells = (
            f'<td class="best">{escape(cell)}</td>' if mark else f"<td>{escape(cell)}</td>"
            for cell, mark in zip(row, marks, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = " last-is-text" if text_last else ""
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll{kind}"><table>{inside}</table></div>'
