"""The board's heat map as a picture for README and docs, from the evidence that ships with the package alone.

python scripts/board_picture.py        writes docs/board-light.svg and docs/board-dark.svg, and their text in README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from fedskew.report.board import STEPS, shade
from fedskew.studies.board.evidence import Row, Task, shipped
from fedskew.studies.board.statistics import ordered, tally
from fedskew.studies.ranking import BASELINE

ROOT = Path(__file__).parents[1]
WIDTH = 480  # narrow, so that its text can be read on a phone
LABEL, CELL, LINE, GAP = 86, 50, 19, 8  # width of a name and of a cell, height of a row, space between columns
NAMES = 13  # letters of a name

COLOURS = {  # of cells and of the text in them, by class: those of the page (board.css)
    "less-4": ("#b35806", "#fff"),
    "less-3": ("#e08214", "#1c2024"),
    "less-2": ("#fdb863", "#1c2024"),
    "less-1": ("#fee0b6", "#1c2024"),
    "even": ("#f3f3f3", "#1c2024"),
    "more-1": ("#d1e5f0", "#1c2024"),
    "more-2": ("#92c5de", "#1c2024"),
    "more-3": ("#4393c3", "#1c2024"),
    "more-4": ("#2166ac", "#fff"),
}


def short(method: str) -> str:
    """A method's name; with a star if it has settings of its own, which the last line names.

    >>> short("fedprox"), short("fedprox:mu=0.1")
    ('fedprox', 'fedprox*')
    """
    name, _, settings = method.partition(":")
    return (name if len(name) <= NAMES else f"{name[: NAMES - 1]}…") + ("*" if settings else "")


class Look(NamedTuple):
    """Colours of one version of the picture."""

    ink: str
    soft: str
    line: str


LOOKS = {"light": Look("#1f2328", "#59636e", "#d1d9e0"), "dark": Look("#e6edf3", "#9198a1", "#3d444d")}


class Group(NamedTuple):
    """Methods that are compared with each other, and what with."""

    title: str
    methods: list[str]  # best first
    own: bool  # compared by the clients' own models


def groups(tasks: Sequence[Task]) -> list[Group]:
    """Methods with a global model, those with public data, controls, and those without a global model."""
    rows: dict[str, list[Row]] = {}
    for task in tasks:
        for row in task.rows:
            rows.setdefault(row.method, []).append(row)
    shared = {m for m, of in rows.items() if any(row.value is not None for row in of)}
    failed = {m for m, of in rows.items() if all(not row.seeds for row in of)}
    public = {m for m, of in rows.items() if of[0].public}
    control = {m for m, of in rows.items() if of[0].control}
    parts = [
        ("global model", (shared | failed) - public - control, False),
        ("public data on the server", (shared | failed) & public, False),
        ("no federation", (shared & control) - public, False),
        ("own models only", rows.keys() - shared - failed, True),
    ]
    order = {own: ordered(tasks, own) for own in (False, True)}
    return [Group(title, [m for m in order[own] if m in these], own) for title, these, own in parts if these]


def cell(task: Task, method: str, own: bool) -> tuple[str, str, bool]:
    """(text, class, whether it is told apart from FedAvg) of a cell; the class "" is an empty one."""
    row = next((row for row in task.rows if row.method == method), None)
    if row is None:
        return "", "", False
    if method == BASELINE:
        return (f"{100 * row.value:.1f} %", "even", False) if row.value is not None else ("", "", False)
    if not task.ranked:
        return "", "unranked", False
    if row.failed:
        return "failed", "less-4", True
    over, margin = (row.own_over, row.own_margin) if own else (row.over, row.margin)
    if over is None:
        return "", "", False
    points = round(100 * over, 1) + 0.0  # no "-0.0"
    return f"{points:+.1f}", shade(100 * over), margin is not None and abs(over) > margin


class Pen:
    """Collects the elements of an SVG."""

    def __init__(self, look: Look) -> None:
        self.look, self.parts = look, list[str]()

    def text(self, x: float, y: float, text: str, *, soft: bool = False, size: float = 12, more: str = "") -> None:
        fill = self.look.soft if soft else self.look.ink
        fill = "" if "fill=" in more else f' fill="{fill}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{fill}{more}>{escape(text)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, kind: str) -> None:
        fill = COLOURS[kind][0] if kind in COLOURS else "url(#stripes)" if kind == "unranked" else "none"
        edge = "" if kind else f' stroke="{self.look.line}" stroke-dasharray="2 2"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="2" fill="{fill}"{edge}/>')


def draw(tasks: Sequence[Task], look: Look) -> str:
    """The picture as SVG."""
    pen, block = Pen(look), LABEL + CELL * len(tasks)
    columns = max(1, (WIDTH + GAP) // (block + GAP))
    top = _legend(pen)
    lines = list(_lines(groups(tasks)))
    low = top
    for i, part in enumerate(_shares(lines, columns)):
        low = max(low, _column(pen, tasks, part, i * (block + GAP), top))
    low += 8
    for text in _words(tasks):
        low += 16
        pen.text(0, low, text, soft=True, size=11.5)
    high, wide = low + 8, max(WIDTH, block)
    stripes = (
        '<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="1.2" height="6" fill="{look.line}"/></pattern>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high:g}" viewBox="0 0 {wide} {high:g}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join(
        [head, f"<title>{escape(about(tasks))}</title>", f"<defs>{stripes}</defs>", *pen.parts, "</svg>\n"]
    )


def _legend(pen: Pen) -> float:
    """The scale of colours; where the map begins."""
    pen.text(0, 14, "Points over tuned FedAvg", more=' font-weight="600"')
    kinds = [f"less-{i}" for i in range(len(STEPS), 0, -1)] + ["even"] + [f"more-{i}" for i in range(1, len(STEPS) + 1)]
    words = [f"−{bound:g}" for bound in reversed(STEPS)] + ["0"] + [f"+{bound:g}" for bound in STEPS]
    for i, (kind, word) in enumerate(zip(kinds, words, strict=True)):
        pen.box(i * 34, 22, 32, 16, kind)
        pen.text(i * 34 + 16, 34, word, size=11, more=f' text-anchor="middle" fill="{COLOURS[kind][1]}"')
    pen.text(9 * 34 + 4, 34, "and beyond", soft=True, size=11.5)
    pen.text(0, 56, "Bold: the 95 % interval over seeds leaves out 0. Pale: it does not.", soft=True, size=11.5)
    return 66


def _lines(found: Sequence[Group]) -> Iterator[tuple[str, Group]]:
    """The lines of the map: the title of each group, "" for it, then its methods."""
    for group in found:
        yield "", group
        for method in group.methods:
            yield method, group


def _shares(lines: Sequence[tuple[str, Group]], columns: int) -> Iterator[list[tuple[str, Group]]]:
    """The lines in columns of about equal height. A column begins with a title: that of its group if it is cut."""
    high = -(-(len(lines) + columns - 1) // columns)
    rest = list(lines)
    while rest:
        part, rest = rest[:high], rest[high:]
        while rest and len(part) > 1 and not part[-1][0]:  # no title at the bottom
            rest.insert(0, part.pop())
        if rest and rest[0][0]:
            rest.insert(0, ("", rest[0][1]))
        yield part


def _column(pen: Pen, tasks: Sequence[Task], lines: Sequence[tuple[str, Group]], left: float, top: float) -> float:
    """Draw some lines below the names of the tasks; where they end."""
    for i, task in enumerate(tasks):
        middle = left + LABEL + CELL * (i + 0.5)
        pen.text(middle, top + 14, task.name, more=' text-anchor="middle" font-weight="600"')
    y = top + LINE
    for method, group in lines:
        if not method:
            pen.text(left, y + 14, group.title, soft=True, size=11.5, more=' font-style="italic"')
        else:
            pen.text(left, y + 14, short(method), more=' font-weight="600"' if method == BASELINE else "")
            for i, task in enumerate(tasks):
                _draw_cell(pen, cell(task, method, group.own), left + LABEL + CELL * i, y)
        y += LINE
    return y


def _draw_cell(pen: Pen, found: tuple[str, str, bool], x: float, y: float) -> None:
    text, kind, sure = found
    pale = bool(text) and not sure and not text.endswith("%")
    pen.parts.append('<g opacity="0.72">' if pale else "<g>")
    pen.box(x + 1, y + 1, CELL - 2, LINE - 2, kind)
    if text:
        bold = ' font-weight="700"' if sure else ""
        pen.text(x + CELL / 2, y + 14, text, size=11.5, more=f'{bold} text-anchor="middle" fill="{COLOURS[kind][1]}"')
    pen.parts.append("</g>")


def _words(tasks: Sequence[Task]) -> Iterator[str]:
    """What the tasks are, and what is special about some of them."""
    for task in tasks:
        yield f"{task.name}  {task.title}; {task.seeds} seeds"
    if open_ := [task.name for task in tasks if not task.ranked]:
        yield f"Striped: not ranked, FedAvg has not converged ({', '.join(open_)})."
    if partial := [task.name for task in tasks if task.missing]:
        yield f"Dotted: not finished ({', '.join(partial)})."
    if starred := [method for group in groups(tasks) for method in group.methods if ":" in method]:
        yield f"* not the default: {', '.join(starred)}"
    if any(group.own for group in groups(tasks)):
        yield "Own models only: accuracy at the clients, over FedAvg's model there."


def about(tasks: Sequence[Task]) -> str:
    """What the picture shows, in words for those who cannot see it."""
    found = groups(tasks)
    counts, ranked = tally(tasks), sum(task.ranked for task in tasks)
    federated = next((group.methods for group in found if group.title == "global model"), [])
    ahead = [m for m in federated if counts[m]["win"] > counts[m]["loss"]]
    best = ", ".join(f"{m} ({counts[m]['win']} of {ranked})" for m in ahead[:5])
    more = f" and {len(ahead) - 5} more" if len(ahead) > 5 else ""
    methods = len({method.partition(":")[0] for group in found for method in group.methods})
    plural = "" if len(tasks) == 1 else "s"
    told = f"ahead of tuned FedAvg more often than behind: {best or 'none'}{more}"
    return f"Heat map of {methods} methods on {len(tasks)} task{plural}; {told}."


def in_readme(readme: str, tasks: Sequence[Task]) -> str:
    """README with the picture's text as it is now."""
    return re.sub(r'alt="Heat map of [^"]*"', lambda _: f'alt="{escape(about(tasks))}"', readme)


if __name__ == "__main__":
    known = shipped()
    for key, colours in LOOKS.items():
        (ROOT / "docs" / f"board-{key}.svg").write_text(draw(known, colours))
    page = ROOT / "README.md"
    page.write_text(in_readme(page.read_text(), known))
