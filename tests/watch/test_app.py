"""Who is answered, and what the server says: hosts, origins, tokens, paths, headers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `watch` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.testclient import TestClient

from fedskew.core.settings import UsageError
from fedskew.watch.app import SCRIPTS, make_app, stream
from fedskew.watch.folder import Folder
from fedskew.watch.server import Address, watching
from helpers.made_runs import add_round, make_run

TOKEN = "correct horse battery"
FILES = ("/", *SCRIPTS)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "one", rounds=2)
    return tmp_path / "runs"


def client(runs: Path, base: str = "http://127.0.0.1:8471", **options: Any) -> TestClient:
    return TestClient(make_app(Folder(runs), **options), base_url=base)


def first_events(runs: Path, count: int) -> list[str]:
    """The first events of a stream; it never ends by itself."""

    async def collect() -> list[str]:
        found: list[str] = []
        events = stream(Folder(runs), "", [0])
        async for text in events:
            found.append(text)
            if len(found) == count:
                break
        await events.aclose()  # type: ignore[attr-defined]
        return found

    return asyncio.run(collect())


def test_the_page_and_its_files_are_served_and_nothing_else(runs: Path) -> None:
    page = client(runs)
    for path in FILES:
        assert page.get(path).status_code == 200, path
    text = page.get("/").text
    assert not re.search(r"(src|href)=\"(https?:)?//", text)  # nothing from elsewhere
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=", text)  # nothing inline but the page's own style
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    known = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{known}';" in page.get("/").headers["content-security-policy"]
    for path in ("/records.jsonl", "/one/records.jsonl", "/index.html", "/app.py"):
        assert page.get(path).status_code == 404, path


@pytest.mark.parametrize(
    "path", ["/../settings.toml", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/one/../../x"]
)
def test_no_path_leads_out(runs: Path, path: str) -> None:
    (runs.parent / "settings.toml").write_text("secret = 1")
    answer = client(runs).get(path)
    assert answer.status_code in (403, 404)
    assert "secret" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(runs: Path, method: str) -> None:
    assert client(runs).request(method, "/events").status_code == 405


def test_another_name_for_this_machine_is_refused(runs: Path) -> None:
    """DNS rebinding: a site's own name is made to point to 127.0.0.1, so the browser takes this for that site."""
    page = client(runs)
    for host in ("evil.example", "evil.example:8471", "127.0.0.1.evil.example", "", "localhost@evil.example"):
        assert page.get("/watch.js", headers={"host": host}).status_code == 403, host
    for host in ("localhost:9000", "127.0.0.1", "[::1]:8471", "LOCALHOST"):
        assert page.get("/", headers={"host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
def test_other_origins_get_nothing(runs: Path, headers: dict[str, str]) -> None:
    answer = client(runs).get("/watch.js", headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_link_on_another_site_opens_the_page_but_nothing_can_frame_or_embed_it(runs: Path) -> None:
    answer = client(runs).get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"})
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_refusal_has_the_same_headers(runs: Path) -> None:
    answer = client(runs).get("/watch.js", headers={"host": "evil.example"})
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_without_the_token_nothing_is_shown(runs: Path) -> None:
    page = client(runs, "https://box:8471", host="0.0.0.0", token=TOKEN, secure=True)
    for path in (*FILES, "/events", "/?token=wrong", "/events?token=" + TOKEN, "/?token="):
        assert page.get(path, follow_redirects=False).status_code == 401, path
    assert page.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert page.get("/", headers={"cookie": "fedskew_watch=wrong"}).status_code == 401
    assert page.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_can_use(runs: Path) -> None:
    page = client(runs, "https://box:8471", host="0.0.0.0", token=TOKEN, secure=True)
    answer = page.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")  # the address no longer holds the token
    cookie = answer.headers["set-cookie"].lower()
    assert all(word in cookie for word in ("httponly", "secure", "samesite=strict"))
    assert TOKEN not in cookie
    assert page.get("/watch.js").status_code == 200


def test_an_address_that_others_can_reach_needs_a_token_and_tls(tmp_path: Path) -> None:
    for address in (
        Address(host="0.0.0.0"),
        Address(host="192.0.2.1", token=TOKEN),
        Address(host="::", certs=tmp_path),
        Address(host="example.org"),
    ):
        with pytest.raises(UsageError, match="can be reached from other machines"):
            address.check()
    with pytest.raises(UsageError, match="too short"):
        Address(token="short").check()
    with pytest.raises(UsageError, match=r"has no server\.crt"):
        Address(host="0.0.0.0", token=TOKEN, certs=tmp_path).check()
    Address(host="::1").check()


def test_a_stream_begins_with_the_list_the_run_and_its_parts(runs: Path) -> None:
    found = first_events(runs, 4)
    assert [text.split("\n")[0] for text in found] == [
        "event: list",
        "event: run",
        "event: part-curves",
        "event: part-loss",
    ]
    assert all(text.endswith("\n\n") and text.count("\n") == 3 for text in found)


def test_a_name_cannot_end_an_event_or_become_markup(tmp_path: Path) -> None:
    name = "x\n\nevent: list\ndata: {}\r\u2028<img src=x onerror=alert(1)>"
    make_run(tmp_path / name.replace("/", "-"), rounds=1, data=name)
    found = first_events(tmp_path, 2)
    assert all(text.count("\n") == 3 and "\r" not in text for text in found)
    assert json.loads(found[1].split("data: ", 1)[1])["row"]["data"] == name


def test_the_first_response_lists_the_runs_as_text(runs: Path) -> None:
    make_run(runs / "<img src=x onerror=alert(1)>&", rounds=1, method={"name": "</a><script>alert(1)</script>"})
    text = client(runs).get("/").text
    assert ">one</a>" in text
    assert "2 / 10" in text
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;</a>" in text
    assert "<img" not in text
    assert "<script>" not in text
    assert '<p id="none" hidden>' in text


def test_a_folder_without_runs_says_so_in_the_first_response(tmp_path: Path) -> None:
    assert '<p id="none">No run in this folder yet' in client(tmp_path).get("/").text


def test_too_many_open_pages_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.watch.app.MOST_STREAMS", 0)
    assert client(runs).get("/events").status_code == 503


@pytest.mark.slow
def test_a_server_beside_a_run_tells_of_new_rounds_and_ends(runs: Path) -> None:
    with watching(runs, Address(port=0)) as url:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}events", timeout=30) as answer:
            lines = iter(answer)
            assert next(line for line in lines if line.startswith(b'data: {"row"'))
            add_round(runs / "one", 2, accuracy=0.875)
            row = next(json.loads(line[6:]) for line in lines if line.startswith(b'data: {"row"'))["row"]
            assert (row["round"], row["value"]) == (3, "87.50 %")


@pytest.mark.slow
def test_a_server_that_ends_under_an_open_page_prints_nothing(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watching(runs, Address(port=0)) as url:
        page = urllib.request.urlopen(f"{url}events", timeout=30)
        assert page.readline() == b"event: list\n"
    page.close()
    assert capfd.readouterr().err == ""


def test_pages_that_were_closed_make_room_for_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.watch.app.MOST_STREAMS", 1)
    with watching(runs, Address(port=0)) as url:
        address = url.removeprefix("http://").rstrip("/")
        for _ in range(3):
            status, tries = 503, 0
            while status == 503 and tries < 100:  # the one before is gone within a moment
                page, tries = http.client.HTTPConnection(address, timeout=30), tries + 1
                page.request("GET", "/events")
                answer = page.getresponse()
                status = answer.status
                first = answer.readline() if status == 200 else b""
                page.close()
                time.sleep(0.1)
            assert (status, first) == (200, b"event: list\n")


def test_a_port_in_use_is_a_clear_sentence(runs: Path) -> None:
    with watching(runs, Address(port=0)) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(UsageError, match="try --port 0"), watching(runs, Address(port=port)):
            pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_with_certificates_the_page_is_served_by_tls(runs: Path, tmp_path: Path) -> None:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", str(tmp_path / "server.key"), "-out", str(tmp_path / "server.crt")]
    subprocess.run(
        ["openssl", *words.split(), *files, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "server.crt"))
    with watching(runs, Address(port=0, certs=tmp_path, token=TOKEN)) as url:
        assert url.startswith("https://")
        asked = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=30, context=trust) as answer:
            assert b"fedskew watch" in answer.read()


def test_a_certificate_that_is_none_is_a_clear_sentence(runs: Path, tmp_path: Path) -> None:
    for name in ("server.crt", "server.key"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(UsageError, match="cannot be used"), watching(runs, Address(port=0, certs=tmp_path)):
        pass


def test_run_with_watch_prints_the_address_and_changes_no_figure(fedskew: Any) -> None:
    words = ["run", "--rounds", "2", "--split", "iid:clients=2", "--model", "mlp:hidden=4", "--workers", "1", "--json"]
    seen, unseen = fedskew(*words, "--watch"), fedskew(*words)
    assert (seen.code, unseen.code) == (0, 0)
    assert re.search(r"watch it at http://127\.0\.0\.1:\d+/", seen.err)
    assert "fedskew watch runs" in seen.err
    assert seen.json()["digest"] == unseen.json()["digest"]


def test_without_the_extra_no_run_begins(fedskew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = fedskew("run", "--watch", "--rounds", "1")
    assert said.code == 2
    assert "pip install 'fedskew[watch]'" in said.err
    assert not (tmp_path / "runs").exists()


def test_a_mistake_in_the_options_is_one_sentence(fedskew: Any) -> None:
    for words in (["watch", "nowhere"], ["watch", ".", "--host", "0.0.0.0"], ["watch", ".", "--token", "short"]):
        said = fedskew(*words)
        assert said.code == 2
        assert said.err.count("\n") == 1
