"""The board as one HTML page: a heat map of methods x tasks, and a table of each task. Made from the evidence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES, bytes_text, percent
from fedskew.report.charts import lines
from fedskew.report.page import FOLDER, Page
from fedskew.studies.board.evidence import Row, Task
from fedskew.studies.board.statistics import ordered, tally
from fedskew.studies.ranking import BASELINE

FILTERS = {  # class of the body while the box is ticked (see board.css), and the box's words
    "without-public": "no public data",
    "only-sums": "server sees sums only",
    "without-state": "no client state",
}
STEPS = (0.5, 2.0, 5.0, 10.0)  # points at which the heat map's colour changes
FIGURE_TITLES = {
    "f1": "macro F1",
    "tail": "tail classes",
    "personal": "own mean",
    "worst": "worst tenth",
    "new": "new clients",
}

# one cell of a table: its text, what it is sorted by ("": last), its class, and what is shown while the mouse is on it
Cell = tuple[str, float | str, str, str]


def write_board(tasks: Sequence[Task], out: Path) -> None:
    """Write the page about these tasks."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, board_page(tasks).encode())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}.") from None


def board_page(tasks: Sequence[Task]) -> str:
    """The page's HTML."""
    page = Page()
    page.add(f"<style>\n{(FOLDER / 'board.css').read_text()}</style>")
    page.add("<header><h1>fedskew board</h1></header><section><h2>Which method for which skew?</h2>")
    page.add_text(
        "Every method with its default settings on a few tasks, small but real. Its learning rate is one of three, "
        "chosen on validation data with a seed that is not on the board; then it is run with paired seeds. Figures are "
        "of the last round, never the best one. FedAvg is tuned like all others; where its curve is not flat at the "
        "end, nothing is ranked."
    )
    for task in tasks:
        for sentence in cautions(task):
            page.add_text(sentence, "warning")
    links = (f'<li><a href="#{_id(task)}">{escape(task.name)}</a> {escape(task.title)}</li>' for task in tasks)
    page.add(f"<ul>{''.join(links)}</ul>")
    boxes = (f'<label><input type="checkbox" value="{key}"> {words}</label>' for key, words in FILTERS.items())
    page.add(f'<div class="filters"><b>Show only:</b>{"".join(boxes)}</div>')
    add_heat(page, tasks, "Global model: points over tuned FedAvg", lambda row: row.over, lambda row: row.margin, True)
    add_heat(
        page,
        tasks,
        "Clients' own models: points over FedAvg's model at the same clients",
        lambda row: row.own_over,
        lambda row: row.own_margin,
        False,
    )
    page.add("</section>")
    for task in tasks:
        add_task(page, task)
    page.add(f"<script>\n{(FOLDER / 'board.js').read_text()}</script>")
    return page.html("fedskew board: which method for which skew?")


def _id(task: Task) -> str:
    """The name of a task's section, for links within the page."""
    return escape(task.name, quote=True)


def cautions(task: Task) -> list[str]:
    """What a reader must know before reading a task's figures."""
    found = [f"{task.name}: {task.unsettled}; methods are not ranked there."] if task.unsettled else []
    if task.missing:
        found.append(f"{task.name} is not whole: {', '.join(task.missing)} not finished.")
    return found


Read = Callable[[Row], float | None]


def add_heat(page: Page, tasks: Sequence[Task], title: str, over: Read, margin: Read, ranked: bool) -> None:
    """Methods x tasks; `ranked` adds how often a method won, tied and lost, and who is not told apart from the best."""
    counts = tally(tasks)
    rows = {(task.name, row.method): row for task in tasks for row in task.rows}
    first = {row.method: row for task in reversed(tasks) for row in task.rows}

    def cell(task: Task, method: str) -> Cell:
        row = rows.get((task.name, method))
        if row is None:
            return "", "", "gap", "not finished"
        value = row.value if ranked else row.figures.get("personal")
        if method == BASELINE and value is not None:
            return f"{100 * value:.1f} %", 0.0, "even", f"{BASELINE} on {task.name}: {100 * value:.2f} %"
        gap, width = over(row), margin(row)
        if row.failed or not row.seeds:  # it diverged with a seed, which is a loss, or cannot run on the task
            kind = "less-4 sure" if task.ranked and row.failed else "gap"
            return "failed", "", kind, f"{row.failed} of {row.failed + row.seeds} seeds: {row.note}"
        if gap is None:
            return "–", "", "gap", "no such model"
        sure = width is not None and abs(gap) > width
        kinds = [shade(100 * gap), "sure" if sure else "unsure"] if task.ranked else ["unranked"]
        kinds.append("tied" if ranked and row.tied else "")
        spread = f" ± {100 * width:.2f}" if width is not None else ""
        about = f"{method} on {task.name}: {percent(value)} %, {100 * gap:+.2f}{spread} over {row.seeds} seeds"
        points = round(100 * gap, 1) + 0.0  # no "-0.0"
        return f"{points:+.1f}", 100 * gap, " ".join(filter(None, kinds)), about

    columns = ["method", *(task.name for task in tasks), *(["win / tie / loss"] if ranked else [])]
    lines_: list[tuple[Row, list[Cell]]] = []
    for method in ordered(tasks, own=not ranked):
        row = first[method]
        line: list[Cell] = [(method, method, "", "")] + [cell(task, method) for task in tasks]
        count = counts[method]
        if ranked:
            text = f"{count['win']} / {count['tie']} / {count['loss']}" if method != BASELINE else "–"
            line.append((text, count["win"] - count["loss"], "tally", ""))
        if any(each[0] not in ("", "–") for each in line[1 : 1 + len(tasks)]):
            lines_.append((row, line))
    about = [""] + [f"{task.title}. {task.why}" for task in tasks] + [""]
    page.add(f"<h3>{escape(title)}</h3>{scale()}")
    page.add(table(columns, lines_, heat=True, about=about))
    tied = ", = cannot be told apart from the best method of the task" if ranked else ""
    page.add_text(
        f"Bold: the 95 % interval over seeds leaves out 0; pale: it does not{tied}. Striped: {BASELINE} has not "
        "converged, so nothing is "
        "ranked. In italics: controls that do not federate, and methods that need public data.",
        "soft",
    )


def shade(points: float) -> str:
    """The class of a difference in points: less-4 to less-1, even, more-1 to more-4.

    >>> shade(0.3), shade(3.0), shade(-12.0)
    ('even', 'more-2', 'less-4')
    """
    step = sum(abs(points) >= bound for bound in STEPS)
    return "even" if not step else f"{'more' if points > 0 else 'less'}-{step}"


def scale() -> str:
    """The heat map's legend."""
    low = [f'<span class="less-{i}">−{bound:g}</span>' for i, bound in reversed(list(enumerate(STEPS, 1)))]
    high = [f'<span class="more-{i}">+{bound:g}</span>' for i, bound in enumerate(STEPS, 1)]
    return f'<div class="scale">points {"".join(low)}<span class="even">0</span>{"".join(high)} and beyond</div>'


def add_task(page: Page, task: Task) -> None:
    """One task: what it is, FedAvg's curve, and the table of all methods."""
    page.add(f'<section id="{_id(task)}"><h2>{escape(f"{task.name}: {task.title}")}</h2>')
    page.add_text(task.why)
    for sentence in cautions(task):
        page.add_text(sentence, "warning")
    facts = {
        "data": task.settings.get("data", ""),
        "split": task.settings.get("split", ""),
        "model": task.settings.get("model", ""),
        "rounds": task.settings.get("rounds", ""),
        "seeds": task.seeds,
        "learning rates": ", ".join(f"{rate:g}" for rate in task.rates),
        "commit": task.commit,
        "cpu": task.cpu,
    }
    items = "".join(f"<li><b>{escape(key)}</b>{escape(str(value))}</li>" for key, value in facts.items())
    page.add(f'<ul class="facts">{items}</ul>')
    shown = [key for key in FIGURE_TITLES if any(row.figures.get(key) is not None for row in task.rows)]
    columns = ["method", FIGURES[task.goal].words, "last five", f"over {BASELINE}", f"own, over {BASELINE}"]
    columns += [FIGURE_TITLES[key] for key in shown]
    columns += [f"bytes to {BASELINE}'s level", f"seconds to {BASELINE}'s level", "cost of a run", "learning rate"]
    columns += ["server sees", "client state", "cells"]
    page.add(table(columns, [(row, _cells(task, row, shown)) for row in task.rows], heat=False))
    page.add_text(
        "In %. over: paired by seed ± half the 95 % interval; own, over: accuracy of clients' own models, with its "
        "95 % interval over pairs of a seed and a client. Cost: seconds of clients and server, in runs of FedAvg.",
        "soft",
    )
    for row in task.rows:
        if row.note:
            page.add_text(f"{row.method}: {row.note}", "soft")
    curves = [dict(zip(task.curve.rounds, (100 * v for v in of), strict=False)) for of in task.curve.seeds.values()]
    if curves:
        page.add_chart(lines(f"{BASELINE} on {task.name}: it must be flat at the end", [("", {BASELINE: curves})]))
    page.add("</section>")


def _cells(task: Task, row: Row, shown: Sequence[str]) -> list[Cell]:
    """One row of a task's table."""

    def share(value: float | None, kind: str = "") -> Cell:
        return percent(value) if value is not None else "–", "" if value is None else value, kind, ""

    def cost(key: str, text: Callable[[float], str]) -> Cell:
        value = row.costs.get(key)
        return ("–", "", "", "") if value is None else (text(value), value, "", "")

    over = own = "–"
    if row.over is not None:
        over = f"{100 * row.over:+.2f}" + (f" ± {100 * row.margin:.2f}" if row.margin is not None else "")
    if row.own_over is not None and row.own_low is not None and row.own_high is not None:
        own = f"{100 * row.own_over:+.1f} [{100 * row.own_low:+.1f}, {100 * row.own_high:+.1f}]"
    failed = f" ({row.failed} of {row.failed + row.seeds} diverged)" if row.failed else ""
    return [
        (row.method + failed, row.method, "tied" if row.tied else "", "cannot be told apart from the best" * row.tied),
        share(row.value),
        share(row.last_five),
        (over, "" if row.over is None else row.over, "", ""),
        (own, "" if row.own_over is None else row.own_over, "", ""),
        *(share(row.figures.get(key)) for key in shown),
        cost("bytes_to_fedavg", bytes_text),
        cost("seconds_to_fedavg", lambda value: f"{value:.1f}"),
        cost("times_fedavg", lambda value: f"{value:.1f}×"),
        (f"{row.lr:g}" if row.lr else "–", row.lr or "", "", rates_text(row)),
        ("sums" if row.sums_only else "each model", str(row.sums_only), "", ""),
        ("yes" if row.state else "no", str(row.state), "", ""),
        (f"{row.seeds}", row.seeds, f"cells:{task.name}", ""),
    ]


def rates_text(row: Row) -> str:
    """What each learning rate came to on validation data."""
    return "on validation data: " + ", ".join(f"{rate}: {percent(value)}" for rate, value in row.rates.items())


def table(
    columns: Sequence[str], rows: Sequence[tuple[Row, Sequence[Cell]]], *, heat: bool, about: Sequence[str] = ()
) -> str:
    """A table that can be sorted. Its rows carry the data-* marks that the page's filters read. All text is escaped."""
    heads = []
    for i, column in enumerate(columns):
        title = f' title="{escape(about[i], quote=True)}"' if about and about[i] else ""
        first = ' data-first="ascending"' if i == 0 else ""
        heads.append(f'<th scope="col"{first}{title}><button type="button">{escape(column)}</button></th>')
    body = []
    for row, cells in rows:
        marks = {"public": row.public, "sums": row.sums_only, "state": row.state}
        data = "".join(f' data-{key}="{"yes" if value else "no"}"' for key, value in marks.items())
        kind = ' class="control"' if row.control else ' class="baseline"' if row.method == BASELINE else ""
        body.append(f"<tr{kind}{data}>{''.join(_html_cell(row, cell) for cell in cells)}</tr>")
    inside = f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="board{" heat" if heat else ""}">{inside}</table></div>'


def _html_cell(row: Row, cell: Cell) -> str:
    text, value, kind, title = cell
    data = f' data-value="{escape(str(value), quote=True)}"' if value != "" else ""
    if kind.startswith("cells:"):
        return f"<td{data}>{_commands(row, kind.removeprefix('cells:'))}</td>"
    shown = f' class="{kind}"' if kind else ""
    tip = f' title="{escape(title, quote=True)}"' if title else ""
    return f"<td{data}{shown}{tip}>{escape(text)}</td>"


def _commands(row: Row, task: str) -> str:
    """The runs behind a row: the command that verifies each, and its digest."""
    each = (f"fedskew board verify {task}/{row.method}/{seed}  {mark[:16]}" for seed, mark in row.digests.items())
    code = "".join(f"<code>{escape(line)}</code>" for line in each)
    return f"<details><summary>{row.seeds} runs</summary>{code}</details>" if row.digests else "–"
