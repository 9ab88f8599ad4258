"""The HTML report: one file without network access, every chart drawn, light and dark, on desktop and phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.experiment.given import method_text
from fedskew.experiment.run import Run
from fedskew.methods import REGISTRY
from fedskew.report.charts import cloud, heat, over_seeds, split
from fedskew.report.html import write_report
from fedskew.report.runs import find, grouped
from fedskew.report.sections import mean_rows
from fedskew.studies.compare import run_methods

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
BASE = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=16", rounds=3)

PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = charts.filter(c => c.querySelector(":is(.scatterlayer, .barlayer) path, .hm image"));
  const flat = charts.filter(c => c.getBoundingClientRect().height < 100);
  const found = { charts: charts.length, drawn: drawn.length, flat: flat.length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    page: getComputedStyle(document.body).backgroundColor, ink: charts[0].layout?.font.color };
  document.title = "PROBE" + JSON.stringify(found) + "END";
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
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text
    return {chart["title"]: chart for chart in json.loads(text[1]).values()}


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What a probe in the page finds, and what the browser's console printed."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", *options, "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    printed = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r"<title>PROBE(.*?)END", done.stdout)
    assert found, done.stderr[-2000:]
    return dict(json.loads(found[1].replace("&quot;", '"'))), "\n".join(printed)


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
@pytest.mark.parametrize(
    ("options", "page_colour", "ink"),
    [
        (("--window-size=1280,900",), "rgb(255, 255, 255)", "#1c2024"),
        (("--window-size=390,844",), "rgb(255, 255, 255)", "#1c2024"),
        (("--window-size=1280,900", "--blink-settings=preferredColorScheme=0"), "rgb(20, 23, 26)", "#e4e8ec"),
    ],
    ids=["desktop", "phone", "dark"],
)
def test_a_browser_without_network_draws_every_chart_and_logs_no_error(
    page: Path, tmp_path: Path, options: tuple[str, ...], page_colour: str, ink: str
) -> None:
    found, console = browse(page, tmp_path, *options)
    assert console == ""
    assert found["charts"] == found["drawn"] == len(charts(page)) == 11
    assert found["flat"] == 0
    assert found["overflow"] <= 0
    assert (found["page"], found["ink"]) == (page_colour, ink)


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
def test_the_probe_detects_a_chart_that_is_not_drawn_and_an_error(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("draw();\ndark", "Plotly.react = undefined; draw();\ndark"))
    found, console = browse(broken, tmp_path)
    assert found["drawn"] == 0
    assert "Uncaught" in console


def test_the_page_loads_nothing_from_the_network(page: Path) -> None:
    text = page.read_text()
    without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in without_scripts
    assert '<meta name="viewport" content="width=device-width' in without_scripts  # a phone's browser needs it
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!data:)", without_scripts)


def test_curves_are_means_with_a_band_over_seeds(page: Path, runs: Path) -> None:
    assert over_seeds([{1: 10.0, 2: 20.0}, {1: 30.0}]) == ([1, 2], [20.0, 20.0], [pytest.approx(200**0.5), 0.0])
    data = charts(page)["Accuracy by round (%)"]["data"]
    assert [line["name"] for line in data if "name" in line] == ["fedavg", "fedper", "fedprox:mu=0.5"]
    kept = [json.loads((runs / f"fedavg-s{seed}" / "result.json").read_text())["accuracy"] for seed in (0, 1)]
    assert data[1]["y"][-1] == pytest.approx(100 * sum(kept) / 2)
    assert data[0]["x"] == [1, 2, 3, 3, 2, 1]
    for i, mean in enumerate(data[1]["y"]):
        assert data[0]["y"][i] - mean == pytest.approx(mean - data[0]["y"][-1 - i])
    assert data[0]["y"][2] > data[1]["y"][2]


def test_the_final_table_has_means_standard_deviations_and_the_best_in_bold(page: Path) -> None:
    text = page.read_text()
    assert re.search(r'<td>fedper</td><td>-</td><td>-</td><td class="best">[\d.]+ ±[\d.]+</td>', text)
    assert "worst tenth" in text
    assert "rounds</b>3" in text
    assert "dirichlet:alpha=0.5,clients=4" in text


def test_maps_show_classes_and_clients(page: Path, runs: Path) -> None:
    assert mean_rows([[0.2, None, None], [0.4, 0.5, None]]) == [pytest.approx(0.3), 0.5, None]
    result = json.loads((runs / "fedper-s0" / "result.json").read_text())
    (title,) = [t for t in charts(page) if t.startswith("Accuracy by client")]
    cells = charts(page)[title]["data"][0]
    assert cells["y"][1] == "fedper"
    own = [100 * client["personal"]["accuracy"] for client in result["clients"].values()]
    assert cells["z"][1] == pytest.approx(own, abs=1e-3)
    assert len(charts(page)["Accuracy by class (%)"]["data"][0]["z"][0]) == 10
    assert "Clients with the lowest accuracy" in page.read_text()


def test_drift_is_computed_from_the_saved_models(page: Path) -> None:
    """FedPer has personal heads but no global model: distances of heads, no features, no eigenvalue spread."""
    titles = charts(page)
    assert {"Distance of heads: fedavg", "Distance of heads: fedper", "Features: fedavg"} <= titles.keys()
    assert "Features: fedper" not in titles
    apart = np.array(titles["Distance of heads: fedper"]["data"][0]["z"])
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


def test_a_dot_s_area_is_the_number_of_samples_and_many_clients_are_thinned_out() -> None:
    table = np.zeros((250, 2), np.int64)
    table[0, 1], table[3, 0] = 50, 200
    (dots,) = split(table, ["a", "b"])["data"]
    assert (dots["x"], dots["y"], dots["marker"]["size"]) == ([0, 3], ["b", "a"], [50, 200])
    assert dots["text"][1] == "client 3, class a: 200"
    assert "one client in 3" in split(table, ["a", "b"])["title"]


def test_a_small_heat_map_has_numbers_in_its_cells() -> None:
    small, large = (heat("t", [str(i) for i in range(n)], ["y"], [[0.5] * n]) for n in (3, 100))
    assert small["data"][0]["texttemplate"]
    assert "texttemplate" not in large["data"][0]
    assert cloud("t", np.zeros((2, 2)), np.array([0, 11]), [str(i) for i in range(12)])["data"][1]["name"] == "11"


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
    assert list(group.methods) == ["fedavg", "fedper", "fedprox:mu=0.5"]
    assert [run.experiment.seed for run in group.methods["fedavg"]] == [0, 1]
    assert method_text(REGISTRY["fedprox"](mu=0.5)) == "fedprox:mu=0.5"  # type: ignore[call-arg]
    assert method_text(REGISTRY["fedprox"]()) == "fedprox"


def test_the_report_command_and_its_errors(fedskew: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"pip install 'fedskew\[report\]'"):
        write_report([runs], Path("x.html"), drift=False, data_dir=None)
