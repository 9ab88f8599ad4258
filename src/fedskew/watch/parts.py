"""What the page shows of one run, as plain data: charts for charts.js, tables and text. watch.js places them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fedskew.core.settings import UsageError
from fedskew.deploy.messages import OWN_DATA
from fedskew.deploy.status import STATUS, Status, read_server_status
from fedskew.evaluation.figures import COSTS, FIGURES
from fedskew.experiment.live import SPLIT, ClientFigures, Split
from fedskew.experiment.run_directory import CARD
from fedskew.report import charts
from fedskew.report.charts import Chart, Values
from fedskew.report.outcome import VIEWS
from fedskew.watch.entry import Entry, Row, short
from fedskew.watch.folder import Folder
from fedskew.watch.history import LOSS, History
from fedskew.watch.study import Study
from fedskew.watch.watched import Watched

MOST_POINTS = 10_000  # of all curves of a page together
FEWEST = 30  # points of one curve, however many there are
MOST_METHODS = 12  # drawn over a run
MOST_SEEDS = 10  # of each of them
MOST_ROWS = 30  # clients in the heat map: those that do worst now
READING = 0.3  # seconds to read records before the page gets what there is
FACTS = ("model", "clients_per_round", "rounds", "seed")
UNTOLD = (
    "There is no picture: the sites have not told the server how many samples of each class they have. "
    "`fedskew serve --profile` asks for it; a site answers with `fedskew join --allow-profile`."
)
SPENT = ("bytes_up", "bytes_down", "client_seconds", "server_seconds", "seconds", "lost")

Part = dict[str, Any]


class Names(msgspec.Struct, frozen=True):
    """What is needed of model.json: the names of classes and clients."""

    labels: list[str] = []
    clients: list[str] = []


def parts_of(folder: Folder, run: Entry, row: Row) -> tuple[dict[str, Part], bool]:
    """The parts of a page by name, in order, and whether all records are read: if not, ask again at once."""
    if isinstance(run, Watched):
        return run_parts(folder, run, row)
    assert isinstance(run, Study)
    return run.parts(), True


def run_parts(folder: Folder, run: Watched, row: Row) -> tuple[dict[str, Part], bool]:
    """The parts of a run's page, see `parts_of`."""
    others = by_method(folder.together(run))
    everything = [run, *(one for runs in others.values() for one in runs)]
    end, whole = time.monotonic() + READING, True
    for one in everything:
        whole = whole and _update(one, end - time.monotonic())
    names: Names = run.read(CARD, Names) or Names()
    labels = [short(label) for label in names.labels] or [str(c) for c in range(run.history.classes)]
    shown = {"this run": [run.history]}
    for name, runs in others.items():
        shown[f"{name}, other seeds" if name == run.method else name] = [one.history for one in runs]
    parts: dict[str, Part | None] = {
        "sites": sites(run, row),
        "curves": curves(run.history, shown, labels),
        "loss": loss(shown),
        "clients": client_heat(run.history, names.clients),
        "split": split(run, labels, names.clients),
        "costs": costs(shown),
        "lost": lost(run.history, names.clients),
        "settings": settings(run),
    }
    return {name: part for name, part in parts.items() if part is not None}, whole


def by_method(runs: Sequence[Watched]) -> dict[str, list[Watched]]:
    """Runs by method, one per seed: the one written last. At most `MOST_METHODS` methods of `MOST_SEEDS` seeds."""
    found: dict[str, dict[str, Watched]] = {}
    for run in runs:
        if run.method in found or len(found) < MOST_METHODS:
            seeds = found.setdefault(run.method, {})
            if len(seeds) < MOST_SEEDS:
                seeds.setdefault(run.seed, run)
    return {name: list(found[name].values()) for name in sorted(found)}


def _update(run: Watched, seconds: float) -> bool:
    try:
        return run.history.update(run.path, seconds)
    except OSError:
        return True  # no record yet, or the folder is gone


def _values(shown: Mapping[str, Sequence[History]], key: str, most: int, scale: float = 100) -> Values:
    return {name: [history.values(key, most, scale) for history in of] for name, of in shown.items()}


def curves(own: History, shown: Mapping[str, Sequence[History]], labels: Sequence[str]) -> Chart | None:
    """The figures by round, the leading one first; of this run, and of other methods with the same settings."""
    keys = [key for key in (own.leading, *(k for k in VIEWS if k != own.leading)) if key]
    classes = range(min(own.classes, len(labels)))
    most = max(FEWEST, MOST_POINTS // max(1, len(shown) * (len(keys) + len(classes))))
    views = [(VIEWS.get(key, FIGURES[key].words), _values(shown, key, most)) for key in keys]
    by_class = [(labels[c], _values(shown, f"class {c}", most)) for c in classes]
    chart = charts.lines("By round", views, by_class, most=most + 2)
    return chart if chart["views"] else None


def loss(shown: Mapping[str, Sequence[History]]) -> Chart | None:
    """The training loss by round."""
    most = max(FEWEST, MOST_POINTS // 8 // len(shown))
    chart = charts.lines("Training loss", [(LOSS, _values(shown, LOSS, most, 1))], unit="", most=most + 2)
    return chart if chart["views"] else None


def client_name(client: int, names: Sequence[str]) -> str:
    """A client's name, or its number."""
    return short(names[client]) if client < len(names) else str(client)


def client_heat(history: History, names: Sequence[str]) -> Chart | None:
    """Clients x rounds: accuracy or loss of each client's own model; the clients that do worst now come first."""
    lines = history.shown_clients()
    views = [view for k, name in enumerate(("accuracy", "loss")) if (view := heat_view(lines, k, name, names))]
    if not views:
        return None
    recorded, last = views[0]["recorded"], lines[-1]
    listed, population = len(last.values), max(last.population, len(last.values))
    of_all = f"Recorded: {listed:,} of {population:,} clients, every {ordinal(last.step)}" if last.step > 1 else ""
    notes = [f"{of_all}{', and the worst of each round' if last.worst else ''}."] if of_all else []
    notes += [f"Shown: the worst {MOST_ROWS} of {recorded} by the last round."] if recorded > MOST_ROWS else []
    notes += ["Worst first, by the last round; personal model on the client's own test part."]
    chart = charts.heat("Clients by round", [str(line.round + 1) for line in lines], [], [], x="round", y="client")
    return chart | {"views": views, "note": " ".join(notes)}


def heat_view(lines: Sequence[ClientFigures], k: int, name: str, names: Sequence[str]) -> Part | None:
    """One view of the heat map: figure `k` of `ClientFigures.by_client`; None if no client has it."""
    if not lines:
        return None
    columns = [{client: pair[k] for client, pair in line.by_client().items()} for line in lines]
    values = {client: [column.get(client) for column in columns] for client in columns[-1]}
    latest = {c: next(v for v in reversed(row) if v is not None) for c, row in values.items() if any_known(row)}
    worst = sorted(latest, key=lambda c: latest[c] if name == "accuracy" else -latest[c])[:MOST_ROWS]
    if not worst:
        return None
    view: Part = {"name": name, "rows": [client_name(c, names) for c in worst], "recorded": len(latest)}
    if name == "accuracy":
        return view | {"values": [[None if v is None else round(100 * v, 1) for v in values[c]] for c in worst]}
    shown = [values[c] for c in worst]
    high = max(v for row in shown for v in row if v is not None)
    # more is worse: the colours are those of a low accuracy
    return view | {"values": shown, "high": high or 1.0, "unit": "", "digits": 2, "reverse": True}


def any_known(values: Sequence[float | None]) -> bool:
    """Whether one of the values is known."""
    return any(value is not None for value in values)


def ordinal(n: int) -> str:
    """2 gives "2nd", 100 gives "100th".

    >>> [ordinal(n) for n in (2, 3, 11, 21, 100)]
    ['2nd', '3rd', '11th', '21st', '100th']
    """
    return f"{n:,}" + ("th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th"))


def split(run: Watched, labels: Sequence[str], names: Sequence[str]) -> Part | None:
    """Who has which classes; between sites with data of their own that told nobody, why there is no picture."""
    found: Split | None = run.read(SPLIT, Split)
    if found is None and run.settings.get("data") == OWN_DATA:
        return {"kind": "text", "title": charts.SPLIT_TITLE, "note": UNTOLD}
    if found is None or not found.points or found.step < 1:
        return None
    count = len(range(0, found.clients, found.step)) if found.clients <= 10**7 else 0
    labels = labels if len(labels) == found.classes else [str(c) for c in range(min(found.classes, 10**4))]
    points = [p for p in found.points if 0 <= p[0] < count and 0 <= p[1] < len(labels)]
    clients = [client_name(c * found.step, names) for c in range(count)]
    return charts.dots(points, labels, clients, found.step) | {"note": short(found.note)}


def costs(shown: Mapping[str, Sequence[History]]) -> Part | None:
    """Bytes, seconds and lost updates so far: of this run, and the mean of each method's runs."""
    started = {name: [h for h in of if h.rounds] for name, of in shown.items()}
    rows = []
    for name, of in started.items():
        if of:
            means = {key: sum(h.costs[key] for h in of) / len(of) for key in SPENT}
            done = max(h.rounds[-1] for h in of)
            rows.append([name, str(done), *(COSTS[key].text(means[key]) for key in SPENT)])
    if not rows:
        return None
    columns = ["", "rounds", *(COSTS[key].words for key in SPENT)]
    note = "So far; several runs of a method: their mean." if any(len(of) > 1 for of in shown.values()) else "So far."
    return {"kind": "table", "title": "Bytes and seconds", "columns": columns, "rows": rows, "note": note}


def lost(history: History, names: Sequence[str]) -> Part | None:
    """Which clients' updates were lost, when and why; the last ones first."""
    if not history.lost:
        return None
    total, reasons = sum(history.reasons.values()), history.reasons.most_common(5)
    often = [f"{client_name(c, names)} ({n} times)" for c, n in history.losers.most_common(5) if n > 1]
    note = f"{total} updates in all. " + "; ".join(f"{short(why)}: {n}" for why, n in reasons) + "."
    note += f" Most often: {', '.join(often)}." if often else ""
    rows = [[str(round), client_name(client, names), short(why)] for round, client, why in reversed(history.lost)]
    columns = ["round", "client", "why"]
    return {"kind": "table", "title": "Lost updates", "columns": columns, "rows": rows, "note": note, "text": True}


def sites(run: Watched, row: Row) -> Part | None:
    """The sites of a served run as its server sees them, and what it refused; None for a simulated run."""
    if run.read(STATUS, Status) is None:
        return None
    try:
        status = read_server_status(run.path)
    except (UsageError, OSError):
        return None
    running = row.state == "running"
    rows = [
        [
            short(site["name"]),
            "online" if site["online"] and running else "offline",
            clock(site["seen"]) or "-",
            "takes part" if site["agreed"] else "has not agreed yet",
            short(site["lost"]),
        ]
        for site in status["sites"]
    ]
    online = sum(line[1] == "online" for line in rows)
    refused = [short(text) for text in reversed(status["refusals"])]
    columns = ["site", "state", "last seen (UTC)", "run", "last round"]
    note = f"{online} of {len(rows)} online; server {short(status['address'])}, as of {clock(status['time'])} UTC."
    part = {"kind": "table", "title": "Sites", "columns": columns, "rows": rows, "note": note, "text": True}
    return part | {"list": refused, "list_title": "Refused"}


def clock(time: str) -> str:
    """A time in ISO form as people read it: without its time zone."""
    return short(time)[:19].replace("T", " ")


def settings(run: Watched) -> Part:
    """The main settings."""
    training = run.settings.get("training", {})
    more = {f"training.{key}": value for key, value in training.items()} if isinstance(training, dict) else {}
    facts = {key: run.settings[key] for key in FACTS if key in run.settings} | more
    return {
        "kind": "facts",
        "title": "Settings",
        "facts": [[short(key), short(v)] for key, v in facts.items() if v != ""],
    }
