"""What a group of runs found: a sentence, the table of methods, warnings, curves, confusion, classes and clients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from fedskew.evaluation.cautions import cautions
from fedskew.evaluation.figures import FIGURES, Figure
from fedskew.evaluation.metrics import ClientRow
from fedskew.experiment.assemble import Assembled
from fedskew.experiment.run_directory import SavedRun
from fedskew.report import charts
from fedskew.report.page import Page, html_table
from fedskew.report.runs import Group, last_metrics
from fedskew.studies.convergence import unsettled_curve
from fedskew.studies.ranking import finding, over_text

WORST = 10  # clients in the table of the worst
MAX_CLASSES = 40  # with more, there is no confusion matrix
# columns of the table after the one that methods are ordered by
OF_SERVER = ("balanced", "f1", "auroc", "global", "head", "middle", "tail", "ensemble")
OVER_CLIENTS = ("clients", "clients_worst", "personal", "worst", "personal_balanced", "new")
# views of the curves after the figure that methods are ordered by
VIEWS = {
    "global": "global model: accuracy",
    "balanced": "global model: balanced accuracy",
    "f1": "global model: macro F1",
    "clients_worst": "worst tenth of clients, global model",
    "personal": "personal models",
    "worst": "worst tenth of clients, personal models",
}


def add_outcome(page: Page, group: Group, names: Sequence[str]) -> None:
    """Append the finding, the table, warnings and curves. `names` are the classes' names."""
    page.add_text(lead_sentence(group), "finding")
    page.add("<h3>Methods, best first</h3>")
    page.add(final_table(group))
    for sentence in table_notes(group):
        page.add_text(sentence, "soft")
    for sentence in warnings(group, names):
        page.add_text(sentence, "warning")
    views = [(f"{group.figure.words.partition(':')[0]}: {group.figure.measure}", group.figure)]
    views += [(name, FIGURES[key]) for key, name in VIEWS.items() if key != group.figure.key]
    page.add_chart(charts.curves(group, views, names))


def lead_sentence(group: Group) -> str:
    """What the runs found, in a sentence or two."""
    found = finding(group.standings, group.figure, group.baseline)
    if found:
        return found
    first = group.standings[0]
    if first.mean is None:
        return "No run has finished yet: there is nothing to compare."
    seeds = f"{len(first.values)} seeds" if len(first.values) > 1 else "one seed"
    what = f"{group.figure.text(first.mean, first.std)} {group.figure.unit} {group.figure.measure}".strip()
    return f"{first.method} ends at {what} ({group.figure.words.partition(':')[0]}, {seeds})."


def shown_figures(group: Group) -> list[Figure]:
    """The figures that at least one finished run has, the one that methods are ordered by first."""
    done = [run.result for runs in group.finished.values() for run in runs]
    balanced = group.figure.key in ("global", "clients", "personal")
    keys = [
        key
        for key in (*OF_SERVER, *OVER_CLIENTS)
        if not (balanced and key in ("balanced", "f1", "auroc", "personal_balanced"))
    ]
    every = dict.fromkeys([group.figure, *(FIGURES[key] for key in keys)])
    return [figure for figure in every if any(figure.read(result) is not None for result in done)]


def final_table(group: Group) -> str:
    """One line per method, best first: mean and standard deviation over seeds, and the lead over the baseline.

    The best mean of each column is marked. A dash stands where a method has no such model.
    """
    shown = shown_figures(group)
    over = [f"over {group.baseline} (points)"] if group.baseline is not None and len(group.methods) > 1 else []
    means: list[list[float | None]] = []
    rows = []
    for standing in group.standings:
        runs = group.methods[standing.method]
        done = [run.result for run in runs if run.result]
        values = [[v for result in done if (v := figure.read(result)) is not None] for figure in shown]
        means.append([statistics.mean(v) if v else None for v in values])
        texts = [
            figure.text(statistics.mean(v) if v else None, statistics.stdev(v) if len(v) > 1 else None)
            for figure, v in zip(shown, values, strict=True)
        ]
        stopped = [str(run.records[-1].number) for run in runs if not run.result]
        state = f"{len(done)}" + (f" (stopped after round {', '.join(stopped)})" if stopped else "")
        rows.append([standing.method, *texts[:1], *(over_text(standing.over, group.figure) for _ in over)])
        rows[-1] += [*texts[1:], state]
    marks = _best(means, shown)
    best = [[False, *line[:1], *(False for _ in over), *line[1:], False] for line in marks]
    columns = ["method", *(f"{f.words} ({f.unit})" if f.unit else f.words for f in shown), "finished runs"]
    columns[2:2] = over
    return html_table(columns, rows, best=best, text_last=True)


def _best(means: Sequence[Sequence[float | None]], figures: Sequence[Figure]) -> list[list[bool]]:
    """Which cells have the best mean of their column, if at least two methods have a value there."""
    best: list[list[bool]] = [[] for _ in means]
    for i, figure in enumerate(figures):
        known = [v for row in means if (v := row[i]) is not None]
        top = (max if figure.better == "higher" else min)(known) if len(known) > 1 else None
        for row, marks in zip(means, best, strict=True):
            marks.append(top is not None and row[i] == top)
    return best


def table_notes(group: Group) -> list[str]:
    """What the table's numbers are, and why they may not tell the methods apart yet."""
    notes = ["Of the last round: mean ± standard deviation over seeds; ★ the best of a column; - no such model."]
    if any(standing.over and standing.over.margin is not None for standing in group.standings):
        notes.append(
            f"Over {group.baseline}: the mean difference with the same seeds ± half the width of its 95 % interval. "
            "Where the interval includes 0, the two cannot be told apart."
        )
    base = group.finished.get(group.baseline or "", [])
    if base and len(group.methods) > 1 and group.figure.unit == "%":
        curve = list(charts.by_round(base[0], group.figure.of, 1).values())
        if why := unsettled_curve(curve, max(2, len(per_class(base[0]) or []))):
            notes.append(f"{group.baseline} {why}: a lead over it may only show who starts faster.")
    return notes


def warnings(group: Group, names: Sequence[str]) -> list[str]:
    """A sentence per method whose model never recognises some class, about its first run that does so."""
    sentences = []
    for name, runs in group.finished.items():
        for run in runs:
            if found := [s for s in cautions(last_metrics(run), names) if s.startswith("warning: ")]:
                seed = f", seed {run.experiment.seed}" if len(runs) > 1 else ""
                sentences.append(f"{name}{seed}: {'; '.join(s.removeprefix('warning: ') for s in found)}.")
                break
    return sentences


def per_class(run: SavedRun) -> list[float | None] | None:
    """Accuracy by class of the model that leads; None if nothing was evaluated."""
    metrics = last_metrics(run)
    return metrics.leading.per_class if metrics is not None and metrics.leading is not None else None


def mean_rows(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over rows at each position; None where no row has a value."""
    known = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    return [statistics.mean(values) if values else None for values in known]


def add_confusion(page: Page, group: Group, names: Sequence[str]) -> None:
    """Confusion matrices of the model that leads, summed over seeds, and accuracy by class of all methods."""
    tables = {}
    for name, runs in group.finished.items():
        found = [counts for run in runs if (counts := _confusion(run)) is not None]
        if found and len(names) <= MAX_CLASSES:
            tables[with_model(name, runs[0])] = np.sum([np.array(counts) for counts in found], axis=0)
    if tables:
        page.add_chart(charts.confusion(tables, names) | {"note": "all seeds together"})
    rows = {
        with_model(name, runs[0]): of
        for name, runs in group.finished.items()
        if (of := [row for run in runs if (row := per_class(run))])
    }
    if rows:
        values = [mean_rows(of) for of in rows.values()]
        page.add_chart(charts.heat("Accuracy by class (%)", names, list(rows), values, x="class"))


def with_model(name: str, run: SavedRun) -> str:
    """A method's name, which says so if the model that leads is not the global one on the test set."""
    metrics = last_metrics(run)
    if metrics is None or metrics.global_ is not None or metrics.clients is None:
        return name
    return f"{name} ({'global model on' if metrics.clients.global_ else 'personal models on'} clients' test parts)"


def _confusion(run: SavedRun) -> list[list[int]] | None:
    """Of the global model on the test set, else on the clients' test parts, else of the personal models."""
    tables = run.result.confusion if run.result else {}
    return next((tables[key] for key in ("global", "clients", "personal") if key in tables), None)


def add_clients(
    page: Page, group: Group, names: Sequence[str], clients: Sequence[str], setting: Assembled | None
) -> None:
    """Accuracy by client of the first seed, and the table of the clients with the lowest. `clients` are their names."""
    methods = {name: runs[0] for name, runs in group.finished.items() if client_rows(runs[0])}
    if not methods:
        return
    numbers = sorted({int(c) for run in methods.values() for c in client_rows(run)})
    values = [[personal(run, c) for c in numbers] for run in methods.values()]
    seed = group.first.experiment.seed
    title = f"Accuracy by client, its personal model on its own test part (%), seed {seed}"
    page.add_chart(charts.heat(title, [clients[c] for c in numbers], list(methods), values, x="client"))
    page.add(f"<h3>Clients with the lowest accuracy (%, seed {seed})</h3>")

    def mean(client: int) -> float:
        known = [v for run in methods.values() if (v := personal(run, client)) is not None]
        return statistics.mean(known) if known else 1.0

    rows = []
    for client in sorted(numbers, key=mean)[:WORST]:
        own = [personal(run, client) for run in methods.values()]
        shown = ["-" if v is None else f"{100 * v:.1f}" for v in own]
        rows.append([clients[client], *shown, held_by(client, names, setting)])
    page.add(html_table(["client", *methods, "training samples by class"], rows, text_last=True))


def held_by(client: int, names: Sequence[str], setting: Assembled | None) -> str:
    """The classes of a client's training samples, the four largest by name; "-" if the data are not available."""
    if setting is None:
        return "-"
    labels = setting.world.y[setting.world.train[client]].tolist()
    counts = sorted(((labels.count(c), c) for c in set(labels)), reverse=True)
    return ", ".join(f"{names[c]} {n}" for n, c in counts[:4]) + (" ..." if len(counts) > 4 else "")


def personal(run: SavedRun, client: int) -> float | None:
    """The accuracy of a client's personal model on its own test part; None if it was not evaluated."""
    scores = client_rows(run).get(str(client))
    return None if scores is None else scores.personal.accuracy


def client_rows(run: SavedRun) -> dict[str, ClientRow]:
    """Each client's own figures, by client number; empty for a run that did not finish."""
    return run.result.clients if run.result else {}
