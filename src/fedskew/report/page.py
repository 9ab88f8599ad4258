"""A page of one HTML file: text and tables, the charts' data, and the code and styles that show them. No network.

page.css and charts.js know nothing about reports, so that other pages can use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fedskew.report.charts import Chart

FOLDER = Path(__file__).parent
# as JSON inside a script element: nothing that ends the element, or that a browser reads as markup
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Page:
    """A page that is being written: pieces of HTML in order, and the charts they refer to."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.charts: dict[str, Chart] = {}

    def add(self, html: str) -> None:
        """Append a piece of HTML; text of users must be escaped."""
        self.pieces.append(html)

    def add_text(self, text: str, kind: str = "") -> None:
        """Append a paragraph of plain text. `kind` is its class in page.css: soft, finding, warning."""
        self.add(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def add_chart(self, chart: Chart) -> None:
        """Append a chart with its title; the page draws it when it is opened."""
        name = f"chart-{len(self.charts)}"
        self.charts[name] = chart
        note = f"<figcaption>{escape(chart['note'])}</figcaption>" if chart.get("note") else ""
        self.add(f'<figure><h3>{escape(chart["title"])}</h3><div class="chart" id="{name}"></div>{note}</figure>')

    def html(self, title: str) -> str:
        """The whole file: the template with the pieces, the charts, and page.css and charts.js filled in."""
        data = json.dumps(self.charts, separators=(",", ":"))
        for sign, safe in UNSAFE.items():
            data = data.replace(sign, safe)
        parts = {
            "title": escape(title),
            "style": (FOLDER / "page.css").read_text(),
            "body": "\n".join(self.pieces),
            "charts": data,
            "script": (FOLDER / "charts.js").read_text(),
        }
        return filled((FOLDER / "page.html").read_text(), parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its `{{name}}` replaced by the part of that name, which must be safe HTML."""
    texts = template.split("{{")  # split first: a user's text may contain the name of another part
    return texts[0] + "".join(parts[name] + rest for name, _, rest in (text.partition("}}") for text in texts[1:]))


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    best: Sequence[Sequence[bool]] = (),
    text_last: bool = False,
) -> str:
    """A table as HTML. `best` marks cells with the best value; `text_last` aligns the last column as text."""
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
