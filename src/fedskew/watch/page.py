"""The first response: the page with its styles and the beginning of the list, so that it shows runs at first paint.

watch.js then replaces the rows by those of the stream, which also have the times.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedskew.report.page import FOLDER as REPORT
from fedskew.report.page import filled
from fedskew.watch.entry import Row

HERE = Path(__file__).parent
STYLE = (REPORT / "page.css").read_text() + (HERE / "watch.css").read_text()
STYLE_HASH = "sha256-" + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()  # allows it, and only it
TEMPLATE = (HERE / "index.html").read_text()
FIRST = 30  # rows: more than fit in the window of the list


def page(folder: str, rows: Sequence[Row]) -> str:
    """The page as HTML."""
    parts = {"style": STYLE, "folder": escape(folder), "rows": "\n".join(map(line, rows[:FIRST]))}
    return filled(TEMPLATE, parts | {"some": " hidden" if rows else ""})


def line(row: Row) -> str:
    """One row of the list, without times; as `line` in watch.js."""
    done = (
        f"{row.round:,}" + (f" / {row.rounds:,}" if row.rounds else "") + (f" {escape(row.unit)}" if row.unit else "")
    )
    bar = f'<progress max="{row.rounds or 1}" value="{row.round}" aria-label="done"></progress>'
    return (
        f'<tr><td><a class="name" href="#{row.id}">{escape(row.name)}</a></td>'
        f'<td class="text"><span class="state {row.state}">{row.state}</span></td><td>{done}{bar}</td>'
        f'<td>{escape(row.value)}</td><td></td><td></td><td class="text">{escape(row.method)}</td>'
        f'<td class="text">{escape(row.data)}</td><td>{escape(row.seed)}</td></tr>'
    )
