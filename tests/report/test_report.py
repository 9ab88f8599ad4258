"""The HTML report: one file without network access, every chart drawn, light and dark, on desktop and phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES
from fedskew.experiment.config import Experiment
from fedskew.experiment.given import method_text
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import SavedRun
from fedskew.methods import REGISTRY
from fedskew.report.charts import confusion, curves, heat, over_seeds, split
from fedskew.report.html import write_report
from fedskew.report.outcome import mean_rows
from fedskew.report.page import Page, html_table
from fedskew.report.runs import Group, find, grouped
from fedskew.report.sections import client_names
from fedskew.studies.compare import run_methods
from helpers.records import a_record, a_result

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
BASE = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=16", rounds=3)

PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = charts.filter(c => c.querySelector("svg[role=img] :is(path, rect, circle)"));
  const flat = charts.filter(c => c.getBoundingClientRect().height < 60);
  const buttons = [...document.querySelectorAll(".switch button")];
  const menus = [...document.querySelectorAll(".switch select")];
  buttons.forEach(b => b.click());
  menus.forEach(m => { m.selectedIndex = m.options.length - 1; m.onchange(); });
  const after = charts.filter(c => c.querySelector("svg[role=img] :is(path, rect, circle)"));
  const text = document.querySelector(".chart .soft-text");
  const found = { charts: charts.length, drawn: drawn.length, after: after.length, flat: flat.length,
    switches: buttons.length + menus.length, attacked: window.attacked || 0,
    overflow: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth, ink: text && getComputedStyle(text).fill,
    page: getComputedStyle(document.body).backgroundColor };
  document.title = "PROBE" + JSON.stringify(found) + "END";
  if (parent !== window) parent.postMessage(document.title, "*");
}, 500));
</script></body>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run_methods(BASE, ["fedavg", "fedprox:mu=0.5", "fedper"], [0, 1], out, lambda *_: None)
    return out


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    path = runs.parent / "out" / "report.html"
    assert write_report([runs], path, drift=True, data_dir=None) == 6
    return path


def charts(page: Path) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text
    return {chart["title"]: chart for chart in json.loads(text[1]).values()}


# a browser's window may have a least width, a frame has none
FRAME = """<!doctype html><title></title>
<script>addEventListener("message", e => { document.title = e.data; });</script>
<iframe src="inner.html" style="border: 0; width: 390px; height: 844px"></iframe>"""


def browse(page: Path, tmp_path: Path, *options: str, phone: bool = False) -> tuple[dict[str, Any], str]:
    """What a probe in the page finds, and what the browser's console printed. `phone`: in a frame 390 pixels wide."""
    probed, inner = tmp_path / "probed.html", tmp_path / "inner.html"
    (inner if phone else probed).write_text(page.read_text().replace("</body>", PROBE))
    if phone:
        probed.write_text(FRAME)
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", *options, "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    printed = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r"<title>PROBE(.*?)END", done.stdout)
    assert found, done.stderr[-2000:]
    return dict(json.loads(found[1].replace("&quot;", '"'))), "\n".join(printed)


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
@pytest.mark.parametrize(
    ("options", "phone", "page_colour", "ink"),
    [
        ((), False, "rgb(255, 255, 255)", "rgb(93, 102, 112)"),
        ((), True, "rgb(255, 255, 255)", "rgb(93, 102, 112)"),
        (("--blink-settings=preferredColorScheme=0",), False, "rgb(20, 23, 26)", "rgb(154, 164, 175)"),
    ],
    ids=["desktop", "phone", "dark"],
)
def test_a_browser_without_network_draws_every_chart_and_logs_no_error(
    page: Path, tmp_path: Path, options: tuple[str, ...], phone: bool, page_colour: str, ink: str
) -> None:
    found, console = browse(page, tmp_path, "--window-size=1280,900", *options, phone=phone)
    assert console == ""
    assert found["charts"] == found["drawn"] == found["after"] == len(charts(page)) == 12
    assert found["switches"] >= 2
    assert found["flat"] == 0
    assert found["overflow"] <= 0
    assert found["width"] == (390 if phone else 1280)
    assert (found["page"], found["ink"]) == (page_colour, ink)


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
def test_the_probe_detects_a_chart_that_is_not_drawn_and_an_error(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("const KINDS = {", "const KINDS = undefined; const kinds = {"))
    found, console = browse(broken, tmp_path)
    assert found["drawn"] == 0
    assert "Uncaught" in console


HOSTILE = "</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>{{script}}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about data whose file, classes and method have names that try to become code."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    y = np.array([HOSTILE, "b & <b>c</b>"])[rng.integers(0, 2, 120)]
    x = rng.normal(size=(120, 4)).astype(np.float32) + (y == HOSTILE)[:, None]
    data = folder / "<img src=x onerror=window.attacked=1>.npz"
    np.savez(data, x_train=x, y_train=y)
    base = replace(BASE, data=str(data), split="iid:clients=2", rounds=2)
    run_methods(base, ["fedavg", "fedprox:mu=0.5"], [0], folder / "<script>window.attacked=1<", lambda *_: None)
    write_report([folder], folder / "page.html", drift=True, data_dir=None)
    return folder / "page.html"


def test_hostile_names_are_only_ever_text(hostile: Path) -> None:
    text = hostile.read_text()
    assert "<script>window.attacked" not in text
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert charts(hostile)["Accuracy by class (%)"]["columns"] == sorted([HOSTILE, "b & <b>c</b>"])
    evil = heat(HOSTILE, ["a"], ["b"], [[0.5]])
    made = Page()
    made.add_chart(evil)
    made.add_text(HOSTILE, "finding")
    made.add(html_table([HOSTILE], [[HOSTILE]]))
    assert made.html(HOSTILE).count("<script") == 2
    assert "<img" not in made.html(HOSTILE)
    assert made.html(HOSTILE).index("const fedskewCharts") > made.html(HOSTILE).index('id="charts"')  # not in the text


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
def test_a_browser_runs_no_code_of_hostile_names(hostile: Path, tmp_path: Path) -> None:
    found, console = browse(hostile, tmp_path)
    assert found["attacked"] == 0
    assert found["drawn"] == found["charts"]
    assert console == ""


def test_the_page_is_small(page: Path) -> None:
    assert page.stat().st_size < 200_000


def test_the_page_opens_with_the_finding_and_ends_with_the_settings(page: Path) -> None:
    text = page.read_text()
    first, *_ = re.findall(r"<p[^>]*class=\"finding\">(.*?)</p>", text)
    assert re.match(r"fedprox:mu=0.5.*(fedavg)", first)
    order = ["finding", "Methods, best first", "By round", "Confusion", "Who has what", "by client,", "Costs", "Drift"]
    order += ["Settings", "How to repeat it"]
    body = text[text.index("<body>") : text.index('<script type="application/json"')]
    places = [body.index(words) for words in order]
    assert places == sorted(places)


def test_the_page_loads_nothing_from_the_network(page: Path) -> None:
    text = page.read_text()
    without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in without_scripts
    assert '<meta name="viewport" content="width=device-width' in without_scripts  # a phone's browser needs it
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!data:)", without_scripts)


def test_curves_are_means_with_a_band_over_seeds(page: Path, runs: Path) -> None:
    assert over_seeds([{1: 10.0, 2: 20.0}, {1: 30.0}]) == ([1, 2], [20.0, 20.0], [pytest.approx(200**0.5), 0.0])
    views = {view["name"]: view for view in charts(page)["By round"]["views"]}
    first = views["global model, test set: accuracy"]["series"]
    assert {line["name"] for line in first} == {"fedavg", "fedprox:mu=0.5"}  # FedPer has no global model
    assert len(views["personal models"]["series"]) == 3
    kept = [json.loads((runs / f"fedavg-s{seed}" / "result.json").read_text())["accuracy"] for seed in (0, 1)]
    (fedavg,) = [line for line in first if line["name"] == "fedavg"]
    assert [point[0] for point in fedavg["points"]] == [1, 2, 3]
    assert fedavg["points"][-1][1] == pytest.approx(100 * sum(kept) / 2, abs=1e-3)
    assert fedavg["points"][-1][2] == pytest.approx(100 * abs(kept[0] - kept[1]) / 2**0.5, abs=1e-3)
    assert len(views["one class"]["choices"]) == 10


def test_long_curves_are_thinned_out_but_keep_their_last_round() -> None:
    records = [a_record(i, 0.5 + i / 10_000) for i in range(1001)]
    group = Group({"fedavg": [SavedRun(Path("x"), BASE, records, a_result(0.6))]})
    (line,) = curves(group, [("a", FIGURES["global"])], [])["views"][0]["series"]
    assert len(line["points"]) <= 400
    assert line["points"][-1][0] == 1001


def test_the_table_is_sorted_with_differences_and_dashes(page: Path) -> None:
    text = page.read_text()
    table = text[text.index("Methods, best first") : text.index("Of the last round")]
    names = re.findall(r"<tr><td>(.*?)</td>", table)
    assert names[-1] == "fedper"
    assert re.search(r"<tr><td>fedper</td><td>-</td><td>-</td>", table)
    assert re.search(r"<tr><td>fedprox:mu=0.5</td><td[^>]*>[\d.]+ ±[\d.]+</td><td>[+-][\d.]+</td>", table)
    assert "over fedavg (points)" in table
    assert 'class="best"' in table
    assert "worst tenth" in table
    assert "model</b>mlp:hidden=16" in text
    assert "dirichlet:alpha=0.5,clients=4" in text


def test_the_net_is_named_instead_of_auto(tmp_path: Path) -> None:
    list(Run(replace(BASE, model="auto", rounds=1), out=tmp_path / "run"))
    write_report([tmp_path], tmp_path / "r.html", drift=False, data_dir=None)
    assert "model</b>mlp</li>" in (tmp_path / "r.html").read_text()


def test_a_model_that_calls_every_patient_healthy_is_warned_about(tmp_path: Path) -> None:
    """95 of 100 are healthy; with a learning rate of almost 0 the model says one class only."""
    rng = np.random.default_rng(0)
    y = np.array(["healthy"] * 190 + ["sick"] * 10)
    np.savez(tmp_path / "own.npz", x_train=rng.normal(size=(200, 4)).astype(np.float32), y_train=y)
    own = replace(BASE, data=str(tmp_path / "own.npz"), split="iid:clients=2", rounds=20)
    list(Run(own, out=tmp_path / "run"))
    write_report([tmp_path / "run"], tmp_path / "r.html", drift=False, data_dir=None)
    text = (tmp_path / "r.html").read_text()
    assert "fedavg ends at 50.00 % balanced accuracy (global model, test set, one seed)." in text
    assert re.search(
        r'class="warning">fedavg: the global model predicts class &#x27;healthy&#x27; for every sample', text
    )


def test_maps_show_classes_confusion_and_clients(page: Path, runs: Path) -> None:
    assert mean_rows([[0.2, None, None], [0.4, 0.5, None]]) == [pytest.approx(0.3), 0.5, None]
    result = json.loads((runs / "fedper-s0" / "result.json").read_text())
    (title,) = [t for t in charts(page) if t.startswith("Accuracy by client")]
    cells = charts(page)[title]
    own = [100 * client["personal"]["accuracy"] for client in result["clients"].values()]
    assert cells["views"][0]["values"][cells["rows"].index("fedper")] == pytest.approx(own, abs=1e-3)
    assert len(charts(page)["Accuracy by class (%)"]["columns"]) == 10
    assert charts(page)["Accuracy by class (%)"]["rows"][-1] == "fedper (personal models on clients' test parts)"
    views = charts(page)["Confusion: share of each class by prediction (%)"]["views"]
    assert len(views) == 3
    results = [json.loads((runs / f"fedavg-s{seed}" / "result.json").read_text()) for seed in (0, 1)]
    both = np.sum([r["confusion"]["global"] for r in results], axis=0)
    (fedavg,) = [view for view in views if view["name"] == "fedavg"]
    assert fedavg["counts"] == both.tolist()
    assert "Clients with the lowest accuracy" in page.read_text()


def test_a_class_without_samples_is_a_gap_in_the_confusion_matrix() -> None:
    (view,) = confusion({"m": np.array([[3, 1], [0, 0]])}, ["a", "b"])["views"]
    assert view["values"] == [[75.0, 25.0], [None, None]]


def test_rounds_to_the_baseline_use_the_same_seed_and_a_target_is_in_percent(runs: Path, tmp_path: Path) -> None:
    """FedAvg reaches its own last value at the latest in the last round, with every seed."""
    write_report([runs], tmp_path / "r.html", drift=False, data_dir=None)
    text = (tmp_path / "r.html").read_text()
    costs = text[text.index("<h3>Costs") :]
    assert "rounds to fedavg&#x27;s last value" in costs
    assert re.search(r"<tr><td>fedavg</td>(<td>[^<]*</td>){4}<td>[123](\.5)?</td>", costs)
    assert re.search(r"<tr><td>fedper</td>(<td>[^<]*</td>){4}<td>-</td><td>-</td>", costs)
    write_report([runs], tmp_path / "r.html", drift=False, data_dir=None, target=1.5)
    assert "rounds to 1.50 %" in (tmp_path / "r.html").read_text()
    with pytest.raises(UsageError, match="--target"):
        write_report([runs], tmp_path / "r.html", drift=False, data_dir=None, target=0.8)


def test_drift_is_computed_from_the_saved_models(page: Path) -> None:
    """FedPer has personal heads but no global model: distances of heads, no features, no eigenvalue spread."""
    titles = charts(page)
    assert {"Distance of heads: fedavg", "Distance of heads: fedper", "Features: fedavg"} <= titles.keys()
    assert "Features: fedper" not in titles
    apart = np.array(titles["Distance of heads: fedper"]["views"][0]["values"])
    ends = {chart["high"] for title, chart in titles.items() if title.startswith("Distance of heads")}
    assert len(ends) == 1  # one colour scale
    assert max(ends) >= apart.max() - 1e-3
    assert apart.shape == (4, 4)
    assert (apart.diagonal() == 0).all()
    assert re.search(r"<td>fedper</td><td>[\d.]+</td><td>-</td>", page.read_text())


@pytest.mark.slow  # trains for seconds
def test_the_report_s_drift_equals_the_run_s_diagnostics(tmp_path: Path) -> None:
    asked = replace(BASE, rounds=2, method=REGISTRY["scaffold"](), evaluation=replace(BASE.evaluation, diagnose=True))
    run = Run(asked, out=tmp_path / "run")
    list(run)
    write_report([tmp_path / "run"], tmp_path / "r.html", drift=True, data_dir=None)
    found = run.result.diagnostics
    shown = f"<td>{found.head_distance:.4g}</td><td>{found.eigenvalue_spread:.4g}</td>"
    assert shown in (tmp_path / "r.html").read_text()


def test_the_page_shows_how_to_repeat_each_run(page: Path, runs: Path) -> None:
    text = page.read_text()
    assert "fedskew run --config fedprox.toml --seed 0" in text
    assert json.loads((runs / "fedavg-s1" / "result.json").read_text())["model_digest"][:16] in text
    assert "mu = 0.5" in text


def test_dots_are_samples_by_client_and_class_and_many_clients_are_thinned_out() -> None:
    table = np.zeros((250, 2), np.int64)
    table[0, 1], table[3, 0] = 50, 200
    names = [f"site {i}" for i in range(250)]
    chart = split(table, ["a", "b"], names)
    assert (chart["points"], chart["rows"]) == ([[0, 1, 50], [1, 0, 200]], ["a", "b"])
    assert chart["columns"][:2] == ["site 0", "site 3"]
    assert "one client in 3" in chart["title"]


def test_clients_have_the_names_of_sites_or_owners(runs: Path) -> None:
    (group,) = grouped(find([runs]))
    first = group.first
    named = replace(first, result=msgspec.structs.replace(first.result, sites=["north", "south"]))
    assert client_names(Group({"fedavg": [named]}), None) == ["north", "south", "2", "3"]
    assert client_names(group, None) == ["0", "1", "2", "3"]


def test_runs_with_other_settings_have_their_own_section(runs: Path, tmp_path: Path) -> None:
    list(Run(replace(BASE, rounds=1, split="iid:clients=3"), out=tmp_path / "other"))
    out = tmp_path / "r.html"
    assert write_report([runs, tmp_path / "other"], out, drift=False, data_dir=None) == 7
    assert out.read_text().count("<section>") == 2
    assert "2 settings" in out.read_text()


def test_an_unfinished_run_is_marked_as_such(tmp_path: Path) -> None:
    steps = iter(Run(BASE, out=tmp_path / "run"))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    write_report([tmp_path], tmp_path / "r.html", drift=True, data_dir=None)
    text = (tmp_path / "r.html").read_text()
    assert "stopped after round 1" in text
    assert "not finished" in text
    assert "Distance of heads" not in text


def test_without_its_data_the_split_and_drift_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    np.savez(tmp_path / "own.npz", x_train=rng.normal(size=(200, 4)).astype(np.float32) + y[:, None], y_train=y)
    own = replace(BASE, data=str(tmp_path / "own.npz"), rounds=1, split="iid:clients=3")
    list(Run(own, out=tmp_path / "run"))
    (tmp_path / "own.npz").unlink()
    write_report([tmp_path / "run"], tmp_path / "r.html", drift=True, data_dir=None)
    assert "Split and drift are left out" in (tmp_path / "r.html").read_text()
    assert "Accuracy by class (%)" in charts(tmp_path / "r.html")


def test_runs_are_read_once_and_named_by_what_is_not_default(runs: Path) -> None:
    assert len(find([runs, runs / "fedavg-s0"])) == 6
    (group,) = grouped(find([runs]))
    assert set(group.methods) == {"fedavg", "fedper", "fedprox:mu=0.5"}
    assert list(group.methods) == [standing.method for standing in group.standings]
    assert list(group.methods)[-1] == "fedper"  # no global model
    assert [run.experiment.seed for run in group.methods["fedavg"]] == [0, 1]
    assert method_text(REGISTRY["fedprox"](mu=0.5)) == "fedprox:mu=0.5"  # type: ignore[call-arg]
    assert method_text(REGISTRY["fedprox"]()) == "fedprox"


def test_the_report_command_and_its_errors(fedskew: Any, runs: Path) -> None:
    run = fedskew("report", str(runs), "--out", "page.html", "--no-drift")
    assert run.code == 0, run.err
    assert "6 runs in page.html" in run.out
    assert "Distance of heads" not in charts(Path("page.html"))
    assert "holds no run" in fedskew("report", ".").err
    assert "cannot be written" in fedskew("report", str(runs), "--no-drift", "--out", "page.html/x").err
    Path("empty").mkdir()
    Path("empty/settings.toml").write_text(BASE.to_toml())
    assert "no round yet" in fedskew("report", "empty").err
    Path("empty/records.jsonl").write_text("{\n")
    assert "cannot be read" in fedskew("report", "empty").err
    Path("empty/settings.toml").write_text("rounds = 0")
    assert "rounds=0" in fedskew("report", "empty").err
    assert "did you mean 'f1'" in fedskew("report", str(runs), "--goal", "f11").err


def test_the_page_says_how_skewed_the_clients_are(page: Path) -> None:
    text = page.read_text()
    for words in ("total variation 0.", "Hellinger 0.", "Jensen-Shannon 0.", "Gini 0.", "feature skew "):
        assert words in text
