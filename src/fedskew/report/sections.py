"""What a report says about one setting: facts, closing table, curves, split, maps, costs, drift, how to repeat it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.data.split.skew import skew
from fedskew.evaluation.figures import FIGURES, size, spread
from fedskew.experiment.assemble import Assembled, assemble
from fedskew.experiment.diagnostics import mean_distance
from fedskew.experiment.run_directory import versions
from fedskew.experiment.tracking import flat
from fedskew.report import figures
from fedskew.report.page import Page, table
from fedskew.report.runs import Group, Kept

WORDS = {
    "global": "global model, test set",
    "head": "its frequent classes",
    "middle": "its middle classes",
    "tail": "its rare classes",
    "ensemble": "ensemble, test set",
    "clients": "global model, clients' parts",
    "personal": "personal models",
    "worst": "worst tenth",
    "new": "new clients",
}
WORST = 10  # clients in the table of the worst
FACTS = ("data", "split", "model", "rounds", "clients_per_round")


def section(page: Page, group: Group, *, drift: bool, data_dir: Path | None) -> None:
    page.add(f"<section><h2>{escape(group.title)}</h2>")
    page.add(facts(group))
    page.add("<h3>Accuracy at the end (%)</h3>")
    page.add(closing_table(group))
    page.add(page.chart(figures.curves(group)))
    setting, missing = None, ""
    try:
        setting = assemble(group.first.experiment, data_dir=data_dir)
    except UsageError as mistake:
        missing = str(mistake)
    names = class_names(group, setting)
    if setting is not None:
        shown = skew(setting.partition, setting.data.y_train, setting.data.classes)
        page.add(page.chart(figures.split(shown.table, names)))
        page.add(
            f'<p class="soft">Distance to the global mix of classes {shown.mean_distance:.2f} on average '
            f"(0 alike, 1 disjoint); {shown.sizes.min():,} to {shown.sizes.max():,} samples a client.</p>"
        )
    else:
        page.add(f'<p class="soft">Split and drift are left out: {escape(missing)}</p>')
    maps(page, group, names, setting)
    costs(page, group)
    if drift and setting is not None:
        drift_section(page, group, names, data_dir)
    page.add(repeat(group))
    page.add("</section>")


def facts(group: Group) -> str:
    settings = group.first.settings
    chosen = {key: settings[key] for key in FACTS} | flat({"": settings["training"]})
    items = "".join(f"<li><b>{escape(key.strip('/'))}</b>{escape(str(v))}</li>" for key, v in chosen.items() if v != "")
    return f'<ul class="facts">{items}</ul>'


def class_names(group: Group, setting: Assembled | None) -> list[str]:
    if setting is not None and setting.data.labels:
        return list(setting.data.labels)
    count = setting.data.classes if setting is not None else len(best_per_class(group.first) or [])
    return [str(c) for c in range(count)]


def closing_table(group: Group) -> str:
    """One line a method: mean and spread over seeds; the best of each column is bold."""
    words = [w for w in FIGURES if any(run.figure(w) is not None for runs in group.methods.values() for run in runs)]
    means, rows = [], []
    for name, runs in group.methods.items():
        done = [run for run in runs if run.result]
        values = {w: [v for run in done if (v := run.figure(w)) is not None] for w in words}
        means.append({w: statistics.mean(v) if v else None for w, v in values.items()})
        shown = [spread(means[-1][w], statistics.stdev(v) if len(v) > 1 else None) for w, v in values.items()]
        cut = [str(run.records[-1]["round"] + 1) for run in runs if not run.result]
        state = f"{len(done)}" + (f" (stopped after round {', '.join(cut)})" if cut else "")
        rows.append([name, *shown, state])
    top = {w: max((v for m in means if (v := m[w]) is not None), default=None) for w in words}
    best = [[False, *(m[w] is not None and m[w] == top[w] and len(rows) > 1 for w in words), False] for m in means]
    return table(["method", *(WORDS.get(w, w) for w in words), "finished runs"], rows, best=best, text_last=True)


def best_per_class(run: Kept) -> list[float | None] | None:
    """By class: the global model on the test set, else the personal models on the clients' parts."""
    metrics = run.result.get("metrics") or {}
    if metrics.get("global"):
        return list(metrics["global"]["per_class"])
    return list(metrics["clients"]["personal"]["per_class"]) if metrics.get("clients") else None


def mean_rows(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Position by position over seeds; None where no seed has a value."""
    known = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    return [statistics.mean(values) if values else None for values in known]


def maps(page: Page, group: Group, names: Sequence[str], setting: Assembled | None) -> None:
    finished = {name: done for name, runs in group.methods.items() if (done := [r for r in runs if r.result])}
    classes = {name: [row for run in runs if (row := best_per_class(run))] for name, runs in finished.items()}
    classes = {name: rows for name, rows in classes.items() if rows}
    if classes:
        values = [mean_rows(rows) for rows in classes.values()]
        page.add(page.chart(figures.heat("Accuracy by class (%)", names, list(classes), values, x_title="class")))
    with_clients = {name: runs for name, runs in finished.items() if runs[0].result.get("clients")}
    if with_clients:
        clients = sorted({int(c) for runs in with_clients.values() for c in runs[0].result["clients"]})
        values = [[personal(runs[0], c) for c in clients] for runs in with_clients.values()]
        seed = group.first.experiment.seed
        title = f"Accuracy by client, its own model on its own test part (%), seed {seed}"
        page.add(page.chart(figures.heat(title, list(map(str, clients)), list(with_clients), values, x_title="client")))
        page.add(f"<h3>The worst-off clients (seed {seed})</h3>")
        page.add(worst_clients(with_clients, clients, names, setting))


def personal(run: Kept, client: int) -> float | None:
    own = run.result["clients"].get(str(client))
    return None if own is None else float(own["personal"]["accuracy"])


def worst_clients(
    methods: dict[str, list[Kept]], clients: Sequence[int], names: Sequence[str], setting: Assembled | None
) -> str:
    """Those with the lowest accuracy over the methods, with what data they have."""

    def mean(client: int) -> float:
        known = [v for runs in methods.values() if (v := personal(runs[0], client)) is not None]
        return statistics.mean(known) if known else 1.0

    rows = []
    for client in sorted(clients, key=mean)[:WORST]:
        held = "-"
        if setting is not None:
            labels = setting.world.y[setting.world.train[client]].tolist()
            counts = sorted(((labels.count(c), c) for c in set(labels)), reverse=True)
            held = ", ".join(f"{names[c]} {n}" for n, c in counts[:4]) + (" ..." if len(counts) > 4 else "")
        values = [personal(runs[0], client) for runs in methods.values()]
        rows.append([str(client), *("-" if v is None else f"{100 * v:.1f}" for v in values), held])
    return table(["client", *methods, "training samples by class"], rows, text_last=True)


def costs(page: Page, group: Group) -> None:
    names = list(group.methods)

    def mean(of: Callable[[dict[str, Any]], float]) -> list[float]:
        return [statistics.mean(sum(of(r) for r in run.records) for run in runs) for runs in group.methods.values()]

    up, down = (mean(lambda r, key=key: sum(r[key].values())) for key in ("bytes_up", "bytes_down"))  # type: ignore[misc]
    client, server = (mean(lambda r, key=key: r[key]) for key in ("client_seconds", "server_seconds"))  # type: ignore[misc]
    mega = {"up": [round(v / 1e6, 3) for v in up], "down": [round(v / 1e6, 3) for v in down]}
    seconds = {"clients": [round(v, 2) for v in client], "server": [round(v, 2) for v in server]}
    page.add('<div class="grid">')
    page.add(page.chart(figures.bars("Sent in the whole run (MB, all clients)", names, mega)))
    page.add(page.chart(figures.bars("Work in the whole run (seconds)", names, seconds)))
    page.add("</div>")
    rows = [
        [name, size(u), size(d), f"{c:.1f} s", f"{s:.1f} s"]
        for name, u, d, c, s in zip(names, up, down, client, server, strict=True)
    ]
    page.add(table(["method", "up", "down", "clients", "server"], rows))


def drift_section(page: Page, group: Group, names: Sequence[str], data_dir: Path | None) -> None:
    from fedskew.report.drift import drift_of

    finished = {n: next(run for run in runs if run.result) for n, runs in group.methods.items() if runs[0].result}
    seen = {name: drift_of(run, data_dir) for name, run in finished.items()}
    if not seen:
        return
    page.add("<h3>Drift</h3>")
    page.add(
        '<p class="soft">From the saved models of one seed. Heads: distance between the classifiers of up to ten '
        "clients after one more round of local training. Eigenvalue spread (FedMR, Table 7): large where the features "
        "of a class move along few directions. Points: t-SNE of the global model's features of test samples.</p>"
    )
    rows = []
    for name, drift in seen.items():
        apart = mean_distance(drift.heads)
        values = ["-" if v is None else f"{v:.4g}" for v in (apart, drift.spread)]
        rows.append([name, *values])
    page.add(table(["method", "mean distance of heads", "eigenvalue spread"], rows))
    page.add('<div class="grid">')
    for name, drift in seen.items():
        who = [str(i) for i in range(len(drift.heads))]
        apart_map = figures.heat(f"Heads apart: {name}", who, who, drift.heads.tolist(), percent=False)
        page.add(page.chart({**apart_map, "height": 320}))
    page.add('</div><div class="grid">')
    for name, drift in seen.items():
        if drift.points is not None:
            page.add(page.chart(figures.cloud(f"Features: {name}", drift.points, drift.labels, names)))
    page.add("</div>")


def repeat(group: Group) -> str:
    """Commands and settings from which every run comes out again, with the digests to hold it against."""
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    parts = ["<h3>How to repeat it</h3>", f'<p class="soft">Here: {escape(told)}.</p>']
    for name, runs in group.methods.items():
        digests = [run.result.get("model_digest", "not finished")[:16] for run in runs]
        rows = [[str(r.experiment.seed), str(r.path), digest] for r, digest in zip(runs, digests, strict=True)]
        file = f"{name.partition(':')[0]}.toml"
        command = f"fedskew run --config {file} --seed {runs[0].experiment.seed}"
        parts += [
            f"<details><summary>{escape(name)}</summary>{table(['seed', 'directory', 'model digest'], rows)}",
            f"<p>Save as {escape(file)} and run</p><pre>{escape(command)}</pre>",
            f"<pre>{escape(runs[0].experiment.to_toml())}</pre></details>",
        ]
    return "".join(parts)
