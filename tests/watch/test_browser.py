"""The page in a real browser: live, without errors, safe against hostile names, on desktop and phone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

pytest.importorskip("starlette", reason="the extra `watch` is not installed")

from fedskew.experiment.progress import ProgressWriter, Step, StudyProgress
from fedskew.watch.server import Address, watching
from helpers.browser import browser
from helpers.made_runs import add_round, make_run
from helpers.processes import command, quick_context

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=window.attacked=1>\"'&<script>window.attacked=1<\u2215script>"
PATIENCE = 60.0  # seconds until a test gives up


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def until(ask: Callable[[], Any]) -> Any:
    """What is asked for, once it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := ask()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def text_of(driver: Any, where: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent || ''", where))


def errors_in(driver: Any) -> list[Any]:
    return [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_a_new_round_and_the_end_of_a_run_appear_without_a_reload(driver: Any, runs: Path) -> None:
    path = make_run(runs / "one", rounds=2)
    lock = filelock.FileLock(path / ".lock")
    lock.acquire()
    with watching(runs, Address(port=0)) as url:
        driver.get(url)
        until(lambda: "round 2 / 10" in text_of(driver, "#run .summary"))
        until(lambda: driver.execute_script("return document.querySelectorAll('.chart svg[role=img]').length") >= 3)
        driver.execute_script("window.same = true")
        assert text_of(driver, "#run .state") == "running"
        assert "time left" in text_of(driver, "#run .summary")
        add_round(path, 2, accuracy=0.875)
        until(lambda: "round 3 / 10" in text_of(driver, "#run .summary"))
        assert "87.50 %" in text_of(driver, "#run .summary")
        until(lambda: driver.execute_script("return document.querySelectorAll('#part-curves circle').length") == 3)
        lock.release()
        until(lambda: text_of(driver, "#run .state") == "stopped")
        make_run(runs / "two", rounds=1)
        until(lambda: "two" in text_of(driver, "#runs"))
        assert driver.execute_script("return window.same") is True
        assert errors_in(driver) == []
        driver.get("about:blank")


def test_a_killed_run_is_shown_as_stopped(driver: Any, runs: Path) -> None:
    words = ["run", "--rounds", "100000", "--split", "iid:clients=2", "--model", "mlp:hidden=4", "--workers", "1"]
    words += ["--out", str(runs / "killed")]
    process = quick_context().Process(target=command, args=(words, str(runs.parent / "log")))
    process.start()
    try:
        with watching(runs, Address(port=0)) as url:
            driver.get(url)
            until(
                lambda: (
                    text_of(driver, "#run .state") == "running" and "round 0" not in text_of(driver, "#run .summary")
                )
            )
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            until(lambda: text_of(driver, "#run .state") == "stopped")
            driver.get("about:blank")
    finally:
        process.kill()


def test_hostile_names_and_reasons_are_shown_as_text(driver: Any, runs: Path) -> None:
    path = make_run(runs / HOSTILE, data=HOSTILE, split=HOSTILE, method={"name": HOSTILE, "x": HOSTILE})
    add_round(path, 0, lost={0: HOSTILE})
    (path / "model.json").write_text(json.dumps({"labels": [HOSTILE, "b"], "clients": [HOSTILE, "b"]}))
    (path / "failure.json").write_text(json.dumps({"why": HOSTILE}))
    make_run(runs / "other", data=HOSTILE, split=HOSTILE, method={"name": "fedprox", "mu": 0.5}, rounds=1)
    with watching(runs, Address(port=0)) as url:
        driver.get(url)
        until(lambda: HOSTILE in text_of(driver, "#runs"))
        driver.execute_script(
            "[...document.querySelectorAll('.name')].find(b => b.textContent.includes('img')).click()"
        )
        until(lambda: HOSTILE in text_of(driver, "#part-lost") and HOSTILE in text_of(driver, "#run h2"))
        assert text_of(driver, "#run .state") == "failed"
        assert text_of(driver, "#run .warning") == HOSTILE
        assert driver.execute_script("return window.attacked") is None
        assert driver.execute_script("return document.querySelectorAll('img, script:not([src])').length") == 0
        assert errors_in(driver) == []
        driver.get("about:blank")


def test_the_list_is_there_before_any_script_and_no_request_leaves_the_server(driver: Any, runs: Path) -> None:
    make_run(runs / "one", rounds=2)
    driver.execute_cdp_cmd("Network.enable", {})
    try:
        with watching(runs, Address(port=0)) as url:
            driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*.js"]})
            driver.get(url)
            assert "2 / 10" in text_of(driver, "#runs tbody tr")
            assert (
                driver.execute_script("return getComputedStyle(document.querySelector('.state')).borderRadius") != "0px"
            )
            driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
            driver.get_log("browser")
            driver.get(url)
            until(lambda: "round 2 / 10" in text_of(driver, "#run .summary"))
            asked = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert {one.removeprefix(url).partition("?")[0] for one in asked} <= {"charts.js", "watch.js", "events"}
            assert errors_in(driver) == []
            driver.get("about:blank")
    finally:
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})


def test_clients_are_shown_by_accuracy_or_loss(driver: Any, runs: Path) -> None:
    """Client 0 has accuracy .5 and loss .5, client 1 has .25 and 2: client 1 is the worst by both."""
    make_run(runs / "one", rounds=2)
    with watching(runs, Address(port=0)) as url:
        driver.get(url)
        until(lambda: text_of(driver, "#part-clients svg"))
        assert "100 %" in text_of(driver, "#part-clients svg")
        driver.execute_script(
            "[...document.querySelectorAll('#part-clients button')].find(b => b.textContent === 'loss').click()"
        )
        shown = text_of(driver, "#part-clients svg")
        assert "2.00" in shown
        assert "%" not in shown
        assert errors_in(driver) == []
        driver.get("about:blank")


def test_a_board_that_goes_on_is_shown_live_with_hostile_names_as_text(driver: Any, runs: Path) -> None:
    start = StudyProgress(kind="board", title=f"t9: {HOSTILE}", figure="global", total=4)
    with watching(runs, Address(port=0)) as url, ProgressWriter(runs / "board" / "t9", start) as writer:
        driver.get(url)
        until(lambda: HOSTILE in text_of(driver, "#run h2"))
        assert text_of(driver, "#run .state") == "running"
        writer.written = float("-inf")
        writer.add(Step(method=HOSTILE, part="seed 0", value=0.875, rounds=2, curve=[(1, 0.5), (2, 0.875)]))
        writer.add(Step(method="fedprox", part="seed 0", value=None, failed=HOSTILE))
        writer.tell("fedprox seed 1, round 3/9", 2, 4, 90.0)
        until(lambda: "87.50" in text_of(driver, "#part-cells"))
        assert "2 / 4 runs" in text_of(driver, "#run .summary")
        assert "now: fedprox seed 1, round 3/9" in text_of(driver, "#run .summary")
        assert "time left: 1 min" in text_of(driver, "#run .summary") or "2 min" in text_of(driver, "#run .summary")
        assert HOSTILE in text_of(driver, "#part-cells .refused")
        until(lambda: driver.execute_script("return document.querySelectorAll('#part-curves circle').length") == 2)
        assert driver.execute_script("return window.attacked") is None
        assert errors_in(driver) == []
        driver.get("about:blank")


def test_a_page_of_another_origin_gets_nothing(driver: Any, runs: Path, tmp_path: Path) -> None:
    """Another port is another origin. Its page cannot read, frame or embed anything of this one."""
    make_run(runs / "one", rounds=1)
    (tmp_path / "elsewhere").mkdir()
    with watching(runs, Address(port=0)) as url, watching(tmp_path / "elsewhere", Address(port=0)) as other:
        driver.get(other.replace("127.0.0.1", "localhost"))
        ask = """const done = arguments[1];
        fetch(arguments[0] + "events").then(() => done("read"), () => done("refused"));"""
        assert driver.execute_async_script(ask, url) == "refused"
        driver.get("about:blank")


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_and_everything_can_be_reached_by_keyboard(
    driver: Any, runs: Path, width: int, mode: str
) -> None:
    make_run(runs / ("a-rather-long-name-of-a-run-" * 4), rounds=5)
    make_run(runs / "other", rounds=5, method={"name": "fedprox", "mu": 0.5})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    try:
        with watching(runs, Address(port=0)) as url:
            driver.get(url)
            until(lambda: driver.execute_script("return document.querySelectorAll('.chart svg[role=img]').length") >= 3)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            page = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (page == "rgb(255, 255, 255)") == (mode == "light")
            clickable = "return [...document.querySelectorAll('[onclick], .name, .switch button, .legend button')]"
            assert driver.execute_script(f"{clickable}.every(e => e.matches('button, a[href]') && e.tabIndex === 0)")
            before = text_of(driver, "#run h2")
            driver.execute_script("document.querySelectorAll('.name')[1].focus()")
            from selenium.webdriver.common.keys import Keys

            driver.switch_to.active_element.send_keys(Keys.ENTER)
            until(lambda: text_of(driver, "#run h2") not in ("", before))
            driver.get("about:blank")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
