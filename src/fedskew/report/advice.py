"""The page of `fedskew advise`: the answer first, then what it rests on."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

import numpy as np

from fedskew import __version__
from fedskew.core.files import write_atomically
from fedskew.evaluation.figures import FIGURES, Figure
from fedskew.report import charts
from fedskew.report.page import Page, html_table
from fedskew.studies.advise import Advice
from fedskew.studies.advise.shortlist import evidence_of
from fedskew.studies.ranking import Difference, over_text


def write_page(advice: Advice, path: Path) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, make_page(advice).html("fedskew: advice").encode())


def make_page(advice: Advice) -> Page:
    """The answer, the final, the race, the shortlist and the clients."""
    page = Page()
    settings = advice.experiment.as_dict()
    about = f"{settings['data']}, {settings['split']}; fedskew {__version__}, {time.strftime('%Y-%m-%d')}"
    page.add(f'<header><h1>fedskew advice</h1><p class="soft">{escape(about)}</p></header><section>')
    page.add("<h2>Answer</h2>")
    page.add_text(advice.sentence, "finding")
    if advice.best_global:
        page.add_text(advice.best_global)
    if advice.command:
        page.add(f"<pre>{escape(advice.command)}</pre>")
    page.add_text(f"Judged by the {advice.goal_words}, on the clients' own parts. It took {advice.spent}.", "soft")
    for sentence in advice.warnings:
        page.add_text(sentence, "warning")
    for sentence in advice.notes:
        page.add_text(sentence, "soft")
    _add_final(page, advice)
    _add_race(page, advice)
    _add_shortlist(page, advice)
    page.add("<h2>The clients</h2>")
    profile = advice.profile
    page.add_text(profile.sentence)
    page.add_chart(charts.split(np.array(profile.table), profile.labels, profile.clients))
    page.add("<h2>The chosen experiment</h2>")
    page.add(f"<pre>{escape(advice.experiment.to_toml())}</pre></section>")
    return page


def final_rows(advice: Advice) -> list[list[str]]:
    """Titles, then a row for each method in the final, best first."""
    figure = FIGURES[advice.goal]
    columns = ["method", "lr", "validation", "over fedavg", "test", "over fedavg, test", "one model for all", "seeds"]
    rows = [columns]
    for one in advice.finals:
        rows.append(
            [
                one.method + (" (chosen)" if (one.method, one.lr) == (advice.choice, advice.lr) else ""),
                f"{one.lr:g}",
                figure.text(one.validation),
                _over(one.over, one.margin, figure),
                figure.text(one.test),
                _over(one.test_over, one.test_margin, figure),
                figure.text(one.shared),
                f"{one.seeds}" + (f" ({one.failed})" if one.failed else ""),
            ]
        )
    return rows


def _over(mean: float | None, margin: float | None, figure: Figure) -> str:
    return over_text(None if mean is None else Difference(mean, margin, None, 0), figure)


def evidence_rows(advice: Advice) -> list[list[str]]:
    """Titles, then a row for each method of the nearest tasks of the board; empty if there are none."""
    rows = [
        [
            f"{n.task}: {n.title}",
            f"{n.distance:.2f}",
            row.method,
            figure.text(value) if value is not None else "-",
            _over(over, margin, figure),
            f"{row.seeds}",
        ]
        for n in advice.shortlist.nearest
        for figure in [FIGURES.get(n.goal, FIGURES["global"])]
        for row in n.rows
        for value, over, margin in [evidence_of(row, n.goal == "personal")]
    ]
    return [["task", "distance", "method", "value", "over tuned FedAvg", "seeds"], *rows] if rows else []


def _add_final(page: Page, advice: Advice) -> None:
    columns, *rows = final_rows(advice)
    figure = FIGURES[advice.goal]
    page.add("<h2>Final: fresh seeds</h2>")
    page.add(html_table(columns, rows))
    unit = f" ({figure.unit})" if figure.unit else ""
    page.add_text(
        f"{advice.goal_words[:1].upper()}{advice.goal_words[1:]}{unit}. Means over seeds; "
        "over fedavg: the mean difference with the same seeds ± half "
        "its 95 % interval. The choice rests on the validation columns; the test parts were read once, afterwards. "
        "One model for all: the same measure of the global model on the validation parts.",
        "soft",
    )

    scale = 100 if figure.unit == "%" else 1
    curves: charts.Values = {
        one.method: [{rounds: scale * value for rounds, value in curve} for curve in one.curves]
        for one in advice.finals
    }
    views = [(f"{figure.measure or figure.words}, validation parts", curves)]
    page.add_chart(charts.lines("The final by round", views, unit=figure.unit))


def _add_race(page: Page, advice: Advice) -> None:
    figure = FIGURES[advice.goal]
    page.add("<h2>Race</h2>")
    page.add_text(
        "Successive halving on validation data with two seeds. A candidate is behind if a Wilcoxon signed-rank test of "
        "its paired differences to the leader, over seeds and clients, says so (p adjusted for all candidates).",
        "soft",
    )
    for rounds in dict.fromkeys(row.rounds for row in advice.race):
        rows = [
            [r.method, f"{r.lr:g}", figure.text(r.value), "-" if r.p is None else f"{r.p:.2g}", r.why]
            for r in advice.race
            if r.rounds == rounds
        ]
        table = html_table(["method", "lr", "validation", "p", "what became of it"], rows, text_last=True)
        last = rounds == max(row.rounds for row in advice.race)
        page.add(f"<details{' open' if last else ''}><summary>after {rounds} rounds: {len(rows)} candidates</summary>")
        page.add(f"{table}</details>")
    if advice.left_out:
        rows = [[name, why] for name, why in advice.left_out.items()]
        table = html_table(["candidate", "why"], rows, text_last=True)
        page.add(f"<details><summary>not raced to the end: {len(rows)} candidates</summary>{table}</details>")


def _add_shortlist(page: Page, advice: Advice) -> None:
    page.add("<h2>Shortlist</h2>")
    page.add_text(advice.shortlist.note)
    if rows := evidence_rows(advice):
        page.add(html_table(rows[0], rows[1:]))
    raced = [[name, why] for name, why in advice.shortlist.methods.items()]
    page.add(html_table(["raced", "why"], raced, text_last=True))
    if excluded := [[name, why] for name, why in advice.shortlist.excluded.items()]:
        page.add(html_table(["not raced", "why"], excluded, text_last=True))
