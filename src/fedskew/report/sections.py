"""One group of runs in a report: outcome first, then who has what, clients, costs, drift; settings last."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.data.split.skew import skew
from fedskew.evaluation.figures import COSTS, DIAGNOSTICS, bytes_text
from fedskew.evaluation.rounds import round_costs, to_target
from fedskew.experiment.assemble import Assembled, assemble
from fedskew.experiment.diagnostics import mean_distance
from fedskew.experiment.nets import model_text
from fedskew.experiment.run_directory import SavedRun, versions
from fedskew.experiment.tracking import flat
from fedskew.report import charts
from fedskew.report.outcome import add_clients, add_confusion, add_outcome, client_rows, per_class
from fedskew.report.page import Page, html_table
from fedskew.report.runs import Group

FACTS = ("data", "split", "model", "rounds", "clients_per_round")  # settings listed first
SPENT = ("bytes_up", "bytes_down", "client_seconds", "server_seconds")  # costs in the table of costs
Say = Callable[[str], None]


def add_section(
    page: Page,
    group: Group,
    *,
    drift: bool,
    data_dir: Path | None,
    target: float | None = None,
    say: Say = lambda text: None,
) -> None:
    """Append everything about one group. Without its data set, split and drift are left out and the page says so.

    `target` is a value of the group's figure to show rounds and bytes to; None: the baseline's last value. `say` is
    called with a line before each step that takes long.
    """
    say(f"{group.title}: curves, tables, split")
    page.add(f"<section><h2>{escape(group.title)}</h2>")
    setting, missing = None, ""
    try:
        setting = assemble(group.first.experiment, data_dir=data_dir)
    except UsageError as error:
        missing = str(error)
    names, clients = class_names(group, setting), client_names(group, setting)
    add_outcome(page, group, names)
    add_confusion(page, group, names)
    if setting is not None:
        add_split(page, group, setting, names, clients)
    else:
        page.add_text(f"Split and drift are left out: {missing}", "soft")
    add_clients(page, group, names, clients, setting)
    add_costs(page, group, target)
    if drift and setting is not None:
        add_drift(page, group, names, clients, data_dir, say)
    page.add("<h3>Settings</h3>")
    page.add(facts(group, setting))
    page.add(how_to_repeat(group))
    page.add("</section>")


def facts(group: Group, setting: Assembled | None) -> str:
    """The group's main settings as an HTML list; the net by its name, not "auto", where the data are available."""
    settings = group.first.settings
    chosen = {key: settings[key] for key in FACTS} | flat({"": settings["training"]})
    if setting is not None and isinstance(chosen["model"], str):
        chosen["model"] = model_text(chosen["model"], setting.data.shape)
    items = "".join(f"<li><b>{escape(key.strip('/'))}</b>{escape(str(v))}</li>" for key, v in chosen.items() if v != "")
    return f'<ul class="facts">{items}</ul>'


def class_names(group: Group, setting: Assembled | None) -> list[str]:
    """The names of the classes, or their numbers if the data set has no names or is not available."""
    if setting is not None and setting.data.labels:
        return list(setting.data.labels)
    known: Sequence[str] = getattr(group.first.result, "labels", ())
    if known:
        return list(known)
    count = setting.data.classes if setting is not None else len(per_class(group.first) or [])
    return [str(c) for c in range(count)]


def client_names(group: Group, setting: Assembled | None) -> list[str]:
    """The names of the clients (sites, or owners of the samples), or their numbers if they have none."""
    known = group.first.result.sites if group.first.result is not None else []
    rows = [int(c) + 1 for runs in group.methods.values() for run in runs for c in client_rows(run)]
    count = max([len(setting.partition.clients) if setting is not None else 0, len(known), *rows])
    return [known[c] if c < len(known) else str(c) for c in range(count)]


def add_split(page: Page, group: Group, setting: Assembled, names: Sequence[str], clients: Sequence[str]) -> None:
    """The samples of each client by class, and how skewed they are, in the field's words."""
    found = skew(setting.partition, setting.data.y_train, setting.data.classes)
    page.add_chart(charts.split(found.table, names, clients[: len(found.table)]))
    recorded = group.first.result.skew if group.first.result is not None else {}
    features = recorded.get("features")
    page.add_text(
        f"Mean distance of a client's mix of classes to the global mix (0 equal, 1 disjoint): total variation "
        f"{found.mean_distance:.2f}, Hellinger {found.mean_hellinger:.2f}, Jensen-Shannon "
        f"{found.mean_jensen_shannon:.2f}. Effective classes per client {found.mean_effective:.1f} of {len(names)}, "
        f"{100 * found.empty:.0f} % of (client, class) cells empty. {found.sizes.min():,} to {found.sizes.max():,} "
        f"samples per client, Gini {found.gini:.2f}; imbalance factor {found.imbalance:.1f}"
        + (f"; feature skew {features:.2f}." if features is not None else "."),
        "soft",
    )


def add_costs(page: Page, group: Group, target: float | None) -> None:
    """Bytes and seconds of whole runs, mean over seeds: two charts and a table, with rounds and bytes to a target."""
    names = list(group.methods)
    spent = {key: [_mean_total(runs, key) for runs in group.methods.values()] for key in SPENT}
    megabytes = {way: [round(v / 1e6, 3) for v in spent[f"bytes_{way}"]] for way in ("up", "down")}
    seconds = {who: [round(v, 2) for v in spent[f"{who}_seconds"]] for who in ("client", "server")}
    page.add("<h3>Costs</h3>")
    page.add('<div class="grid">')
    page.add_chart(charts.bars("Sent in the whole run (MB, all clients)", names, megabytes, "MB"))
    page.add_chart(charts.bars("Work in the whole run (seconds)", names, seconds, "s"))
    page.add("</div>")
    shown = [COSTS[key] for key in SPENT]
    columns = ["method", *(figure.words for figure in shown)]
    rows = [[name, *(f.text(spent[f.key][i]) for f in shown)] for i, name in enumerate(names)]
    goals = targets(group, target)
    if goals:
        value = (
            f"{group.figure.text(target)} {group.figure.unit}".strip() if target else f"{group.baseline}'s last value"
        )
        columns += [f"rounds to {value}", f"bytes to {value}"]
        rows = [[*row, *_reached(group, name, goals)] for row, name in zip(rows, names, strict=True)]
    page.add(html_table(columns, rows))
    if goals:
        what = f"{group.figure.measure} ({group.figure.words.partition(':')[0]})"
        same = "" if target else " with the same seed"
        page.add_text(f"Until {what} first reaches {value}{same}; mean over seeds, - if a seed does not.", "soft")


def targets(group: Group, target: float | None) -> dict[int, float]:
    """By seed, the value to show rounds and bytes to: the given one, else the baseline's last with that seed."""
    if target is not None:
        return {run.experiment.seed: target for runs in group.methods.values() for run in runs}
    return next((dict(s.values) for s in group.standings if s.method == group.baseline), {})


def _reached(group: Group, name: str, goals: dict[int, float]) -> list[str]:
    """Rounds and bytes until the figure reaches its seed's goal, mean over seeds; "-" where a seed does not."""
    runs = [run for run in group.methods[name] if run.experiment.seed in goals]
    has_figure = any(s.values for s in group.standings if s.method == name)
    found = [to_target(r.records, goals[r.experiment.seed], group.figure.key) for r in runs if has_figure]
    rounds, sent = ([v for one in found if (v := one[key]) is not None] for key in ("rounds", "bytes"))
    if not found or len(rounds) < len(found):
        return ["-", "-"]
    return [f"{statistics.mean(rounds):.4g}", bytes_text(statistics.mean(sent))]


def _mean_total(runs: Sequence[SavedRun], key: str) -> float:
    """A cost summed over the rounds of each run, mean over the runs. Runs that did not finish count as they are."""
    return statistics.mean(sum(round_costs(record)[key] for record in run.records) for run in runs)


def add_drift(
    page: Page, group: Group, names: Sequence[str], clients: Sequence[str], data_dir: Path | None, say: Say
) -> None:
    """Distances of heads, eigenvalue spread and features of the first finished seed of each method."""
    from fedskew.report.drift import drift_of

    drifts = {}
    for i, (name, runs) in enumerate(group.finished.items()):
        say(f"{group.title}: drift of {name}, {i + 1} of {len(group.finished)} (--no-drift leaves it out)")
        drifts[name] = drift_of(runs[0], data_dir)
    if not drifts:
        return
    page.add("<h3>Drift</h3>")
    page.add_text(
        "From the saved models of one seed. Heads: distance between the classifiers of up to ten clients after one "
        "more round of local training, on one colour scale for all methods. Eigenvalue spread (FedMR, Table 7): large "
        "if the features of a class vary along few directions. Points: t-SNE of the global model's features of test "
        "samples.",
        "soft",
    )
    distance, spread = DIAGNOSTICS["head_distance"], DIAGNOSTICS["eigenvalue_spread"]
    rows = [
        [name, distance.text(mean_distance(drift.heads)), spread.text(drift.eigenvalue_spread)]
        for name, drift in drifts.items()
    ]
    page.add(html_table(["method", distance.words, spread.words], rows))
    high = max((float(drift.heads.max()) for drift in drifts.values() if drift.heads.numel()), default=0.0) or 1.0
    page.add('<div class="grid">')
    for name, drift in drifts.items():
        among = [clients[c] for c in drift.clients]
        page.add_chart(charts.heat(f"Distance of heads: {name}", among, among, drift.heads.tolist(), high=high))
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
        command = f"fedskew run --config {shlex.quote(file)} --seed {runs[0].experiment.seed}"
        parts += [
            f"<details><summary>{escape(name)}</summary>{html_table(['seed', 'directory', 'model digest'], rows)}",
            f"<p>Save as {escape(file)} and run</p><pre>{escape(command)}</pre>",
            f"<pre>{escape(runs[0].experiment.to_toml())}</pre></details>",
        ]
    return "".join(parts)
