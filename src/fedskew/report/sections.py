"""One group of runs in a report: settings, final accuracies, curves, split, heat maps, costs, drift, how to repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.data.split.skew import skew
from fedskew.evaluation.figures import ACCURACIES, COSTS, DIAGNOSTICS, mean_and_std, round_costs
from fedskew.evaluation.metrics import ClientRow
from fedskew.experiment.assemble import Assembled, assemble
from fedskew.experiment.diagnostics import mean_distance
from fedskew.experiment.run_directory import SavedRun, versions
from fedskew.experiment.tracking import flat
from fedskew.report import charts
from fedskew.report.page import Page, html_table
from fedskew.report.runs import Group

WORST = 10  # clients in the table of the worst
FACTS = ("data", "split", "model", "rounds", "clients_per_round")  # settings listed at the top
SPENT = ("bytes_up", "bytes_down", "client_seconds", "server_seconds")  # costs in the table of costs


def add_section(
    page: Page, group: Group, *, drift: bool, data_dir: Path | None, say: Callable[[str], None] = lambda text: None
) -> None:
    """Append everything about one group. Without its data set, split and drift are left out and the page says so.

    `say` is called with a line before each step that takes long.
    """
    say(f"{group.title}: curves, tables, split")
    page.add(f"<section><h2>{escape(group.title)}</h2>")
    page.add(facts(group))
    page.add("<h3>Accuracy at the end (%)</h3>")
    page.add(final_table(group))
    page.add_chart(charts.curves(group))
    setting, missing = None, ""
    try:
        setting = assemble(group.first.experiment, data_dir=data_dir)
    except UsageError as error:
        missing = str(error)
    names = class_names(group, setting)
    if setting is not None:
        add_split(page, setting, names)
    else:
        page.add(f'<p class="soft">Split and drift are left out: {escape(missing)}</p>')
    add_maps(page, group, names, setting)
    add_costs(page, group)
    if drift and setting is not None:
        add_drift(page, group, names, data_dir, say)
    page.add(how_to_repeat(group))
    page.add("</section>")


def facts(group: Group) -> str:
    """The group's main settings as an HTML list."""
    settings = group.first.settings
    chosen = {key: settings[key] for key in FACTS} | flat({"": settings["training"]})
    items = "".join(f"<li><b>{escape(key.strip('/'))}</b>{escape(str(v))}</li>" for key, v in chosen.items() if v != "")
    return f'<ul class="facts">{items}</ul>'


def class_names(group: Group, setting: Assembled | None) -> list[str]:
    """The names of the classes, or their numbers if the data set has no names or is not available."""
    if setting is not None and setting.data.labels:
        return list(setting.data.labels)
    count = setting.data.classes if setting is not None else len(per_class(group.first) or [])
    return [str(c) for c in range(count)]


def final_table(group: Group) -> str:
    """One line per method: mean and standard deviation over seeds. The best mean of each column is bold."""
    every = [run for runs in group.methods.values() for run in runs]
    shown = [figure for figure in ACCURACIES.values() if any(figure.read(run.result) is not None for run in every)]
    means, rows = [], []
    for name, runs in group.methods.items():
        done = [run for run in runs if run.result]
        values = [[v for run in done if (v := figure.read(run.result)) is not None] for figure in shown]
        means.append([statistics.mean(v) if v else None for v in values])
        stds = [statistics.stdev(v) if len(v) > 1 else None for v in values]
        stopped = [str(run.records[-1].number) for run in runs if not run.result]
        state = f"{len(done)}" + (f" (stopped after round {', '.join(stopped)})" if stopped else "")
        rows.append([name, *map(mean_and_std, means[-1], stds), state])
    top = [max((v for v in column if v is not None), default=None) for column in zip(*means, strict=True)]
    best = [
        [False, *(v is not None and v == most and len(rows) > 1 for v, most in zip(line, top, strict=True)), False]
        for line in means
    ]
    return html_table(["method", *(f.words for f in shown), "finished runs"], rows, best=best, text_last=True)


def add_split(page: Page, setting: Assembled, names: Sequence[str]) -> None:
    """The samples of each client by class, and how skewed they are."""
    found = skew(setting.partition, setting.data.y_train, setting.data.classes)
    page.add_chart(charts.split(found.table, names))
    page.add(
        f'<p class="soft">Distance to the global mix of classes {found.mean_distance:.2f} on average '
        f"(0 equal, 1 disjoint); {found.sizes.min():,} to {found.sizes.max():,} samples per client.</p>"
    )


def per_class(run: SavedRun) -> list[float | None] | None:
    """Accuracy by class: of the global model on the test set, else of the personal models on clients' test parts."""
    metrics = run.result.metrics if run.result else None
    if metrics is None:
        return None
    if metrics.global_ is not None:
        return metrics.global_.per_class
    return metrics.clients.personal.per_class if metrics.clients else None


def mean_rows(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over rows at each position; None where no row has a value."""
    known = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    return [statistics.mean(values) if values else None for values in known]


def add_maps(page: Page, group: Group, names: Sequence[str], setting: Assembled | None) -> None:
    """Accuracy by class (mean over seeds) and by client (first seed), and the table of the worst clients."""
    finished = {name: done for name, runs in group.methods.items() if (done := [r for r in runs if r.result])}
    classes = {name: [row for run in runs if (row := per_class(run))] for name, runs in finished.items()}
    classes = {name: rows for name, rows in classes.items() if rows}
    if classes:
        values = [mean_rows(rows) for rows in classes.values()]
        page.add_chart(charts.heat("Accuracy by class (%)", names, list(classes), values, x_title="class"))
    with_clients = {name: runs[0] for name, runs in finished.items() if client_rows(runs[0])}
    if with_clients:
        clients = sorted({int(c) for run in with_clients.values() for c in client_rows(run)})
        values = [[personal(run, c) for c in clients] for run in with_clients.values()]
        seed = group.first.experiment.seed
        title = f"Accuracy by client, its personal model on its own test part (%), seed {seed}"
        page.add_chart(charts.heat(title, list(map(str, clients)), list(with_clients), values, x_title="client"))
        page.add(f"<h3>Clients with the lowest accuracy (seed {seed})</h3>")
        page.add(worst_clients(with_clients, clients, names, setting))


def personal(run: SavedRun, client: int) -> float | None:
    """The accuracy of a client's personal model on its own test part; None if it was not evaluated."""
    scores = client_rows(run).get(str(client))
    return None if scores is None else scores.personal.accuracy


def client_rows(run: SavedRun) -> dict[str, ClientRow]:
    """Each client's own figures, by client number; empty for a run that did not finish."""
    return run.result.clients if run.result else {}


def worst_clients(
    methods: dict[str, SavedRun], clients: Sequence[int], names: Sequence[str], setting: Assembled | None
) -> str:
    """The clients with the lowest mean accuracy over methods, and their training samples by class."""

    def mean(client: int) -> float:
        known = [v for run in methods.values() if (v := personal(run, client)) is not None]
        return statistics.mean(known) if known else 1.0

    rows = []
    for client in sorted(clients, key=mean)[:WORST]:
        held = "-"
        if setting is not None:
            labels = setting.world.y[setting.world.train[client]].tolist()
            counts = sorted(((labels.count(c), c) for c in set(labels)), reverse=True)
            held = ", ".join(f"{names[c]} {n}" for n, c in counts[:4]) + (" ..." if len(counts) > 4 else "")
        values = [personal(run, client) for run in methods.values()]
        rows.append([str(client), *("-" if v is None else f"{100 * v:.1f}" for v in values), held])
    return html_table(["client", *methods, "training samples by class"], rows, text_last=True)


def add_costs(page: Page, group: Group) -> None:
    """Bytes and seconds of whole runs, mean over seeds: two charts and a table."""
    names = list(group.methods)
    spent = {key: [_mean_total(runs, key) for runs in group.methods.values()] for key in SPENT}
    megabytes = {way: [round(v / 1e6, 3) for v in spent[f"bytes_{way}"]] for way in ("up", "down")}
    seconds = {who: [round(v, 2) for v in spent[f"{who}_seconds"]] for who in ("client", "server")}
    page.add('<div class="grid">')
    page.add_chart(charts.bars("Sent in the whole run (MB, all clients)", names, megabytes))
    page.add_chart(charts.bars("Work in the whole run (seconds)", names, seconds))
    page.add("</div>")
    shown = [COSTS[key] for key in SPENT]
    rows = [[name, *(f.text(spent[f.key][i]) for f in shown)] for i, name in enumerate(names)]
    page.add(html_table(["method", *(figure.words for figure in shown)], rows))


def _mean_total(runs: Sequence[SavedRun], key: str) -> float:
    """A cost summed over the rounds of each run, mean over the runs. Runs that did not finish count as they are."""
    return statistics.mean(sum(round_costs(record)[key] for record in run.records) for run in runs)


def add_drift(
    page: Page, group: Group, names: Sequence[str], data_dir: Path | None, say: Callable[[str], None]
) -> None:
    """Distances of heads, eigenvalue spread and features of the first finished seed of each method."""
    from fedskew.report.drift import drift_of

    finished = {n: next(run for run in runs if run.result) for n, runs in group.methods.items() if runs[0].result}
    drifts = {}
    for i, (name, run) in enumerate(finished.items()):
        say(f"{group.title}: drift of {name}, {i + 1} of {len(finished)} (--no-drift leaves it out)")
        drifts[name] = drift_of(run, data_dir)
    if not drifts:
        return
    page.add("<h3>Drift</h3>")
    page.add(
        '<p class="soft">From the saved models of one seed. Heads: distance between the classifiers of up to ten '
        "clients after one more round of local training. Eigenvalue spread (FedMR, Table 7): large if the features "
        "of a class vary along few directions. Points: t-SNE of the global model's features of test samples.</p>"
    )
    distance, spread = DIAGNOSTICS["head_distance"], DIAGNOSTICS["eigenvalue_spread"]
    rows = [
        [name, distance.text(mean_distance(drift.heads)), spread.text(drift.eigenvalue_spread)]
        for name, drift in drifts.items()
    ]
    page.add(html_table(["method", distance.words, spread.words], rows))
    page.add('<div class="grid">')
    for name, drift in drifts.items():
        clients = [str(i) for i in range(len(drift.heads))]
        heat_map = charts.heat(f"Distance of heads: {name}", clients, clients, drift.heads.tolist(), shares=False)
        page.add_chart({**heat_map, "height": 320})
    page.add('</div><div class="grid">')
    for name, drift in drifts.items():
        if drift.points is not None:
            page.add_chart(charts.cloud(f"Features: {name}", drift.points, drift.labels, names))
    page.add("</div>")


def how_to_repeat(group: Group) -> str:
    """Commands and settings that repeat every run, and the digests to compare with."""
    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    parts = ["<h3>How to repeat it</h3>", f'<p class="soft">Here: {escape(here)}.</p>']
    for name, runs in group.methods.items():
        digests = [run.result.model_digest[:16] if run.result else "not finished" for run in runs]
        rows = [[str(r.experiment.seed), str(r.path), digest] for r, digest in zip(runs, digests, strict=True)]
        file = f"{name.partition(':')[0]}.toml"
        command = f"fedskew run --config {file} --seed {runs[0].experiment.seed}"
        parts += [
            f"<details><summary>{escape(name)}</summary>{html_table(['seed', 'directory', 'model digest'], rows)}",
            f"<p>Save as {escape(file)} and run</p><pre>{escape(command)}</pre>",
            f"<pre>{escape(runs[0].experiment.to_toml())}</pre></details>",
        ]
    return "".join(parts)
