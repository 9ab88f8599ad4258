"""The border to Flower: frames, refusals, keys, the commands; and one run over a real network, with TLS and keys."""

from __future__ import annotations

import base64
import contextlib
import io
import queue
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedskew.cli import operations
from fedskew.core.settings import UsageError
from fedskew.deploy import certs, joining
from fedskew.deploy import flower_process as child
from fedskew.deploy.flower import gate, signing, verdicts
from fedskew.deploy.flower.frames import from_records, read_frame, write_frame
from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.joining import server_address
from fedskew.deploy.node import Node
from fedskew.deploy.policy import Policy
from fedskew.deploy.server import Served
from fedskew.deploy.states import States
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_directory import read_settings
from helpers.own_code import MY
from sites import Played, few_digits, nodes_in

ANY_FEDAVG = Policy(methods=frozenset({"fedavg"}))


def has_flower() -> bool:
    with contextlib.suppress(UsageError):
        return bool(child.interpreter())
    return False


needs_flower = pytest.mark.skipif(not has_flower(), reason="Flower is not installed (`make test` installs it)")


# frames


def test_frames_come_out_as_they_went_in_and_end_where_the_pipe_ends() -> None:
    pipe = io.BytesIO()
    write_frame(pipe, {"a": [1, 2.5, "x"]}, b"bytes")
    write_frame(pipe, {})
    whole = pipe.getvalue()
    assert read_frame(io.BytesIO(whole)) == ({"a": [1, 2.5, "x"]}, b"bytes")
    pipe.seek(0)
    assert [read_frame(pipe), read_frame(pipe), read_frame(pipe)] == [({"a": [1, 2.5, "x"]}, b"bytes"), ({}, b""), None]
    for cut in range(len(whole) - 14):
        assert read_frame(io.BytesIO(whole[:cut])) is None or cut >= len(whole) - 14


class Blob:
    def __init__(self, data: object) -> None:
        self.data = data


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"header": {}},
        {"header": {"json": "[1]"}},
        {"header": {"json": "nonsense"}},
        {"header": {"json": 5}},
        {"header": {"json": "[" * 100_000}},
        {"header": {"json": "{}"}, "body": {}},
        {"header": {"json": "{}"}, "body": {"blob": Blob("text")}},
    ],
)
def test_records_that_hold_no_frame_are_refused(records: Any) -> None:
    with pytest.raises(ValueError):
        from_records(records)


def test_records_that_hold_a_frame_give_it_back() -> None:
    assert from_records({"header": {"json": '{"a": 1}'}}) == ({"a": 1}, b"")
    assert from_records({"header": {"json": "{}"}, "body": {"blob": Blob(b"x")}}) == ({}, b"x")


# who is let in


class Known:
    """A SuperLink's state that knows one key."""

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return 7 if key == b"known" else None


class Told:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        self.heard.append(header)


class Guarded:
    """The part of a link that the gate uses."""

    def __init__(self, secure: bool = True) -> None:
        self.pipe, self.secure, self.state, self.access = Told(), secure, Known(), None


def request(key: bytes = b"known", size: int = 10, late: float = 0.0, **changes: bytes) -> dict[bytes, bytes]:
    when = datetime.now(UTC) - timedelta(seconds=late)
    headers = {
        b"content-length": str(size).encode(),
        b"flwr-public-key": base64.b64encode(key),
        b"flwr-timestamp": when.isoformat().encode(),
        b"fedskew-protocol": signing.PROTOCOL,
    }
    return headers | {name.replace("_", "-").encode(): value for name, value in changes.items()}


PULL, JOIN = "/v1/fleet/pull-messages", "/v1/fleet/activate-node"


@pytest.mark.parametrize(
    ("path", "headers", "status", "words"),
    [
        (PULL, lambda: request(), None, ""),
        ("/v1/control/start-run", lambda: request(), 404, "only the Fleet API"),
        ("/v1/runtime/acquire-task", lambda: request(), 404, "only the Fleet API"),
        ("/docs", lambda: request(), 404, "only the Fleet API"),
        (PULL, lambda: request(size=9 << 20), 413, "a request may have at most"),
        (PULL, lambda: request(content_length=b"many"), 413, "a request may have at most"),
        (PULL, dict, 413, "a request may have at most"),
        ("/v1/fleet/get-fab", lambda: request(), 404, "only the Fleet API"),
        (PULL, lambda: request(fedskew_protocol=b"1"), 403, "version: it speaks 2, not '1'"),
        (PULL, lambda: request(flwr_timestamp=b"yesterday"), 401, "not signed"),
        (PULL, lambda: request(flwr_public_key=b"?"), 401, "not signed"),
        (PULL, lambda: request(late=200), None, ""),
        (PULL, lambda: request(late=400), 403, "s behind the server's"),
        (PULL, lambda: request(late=-2), None, ""),
        (PULL, lambda: request(late=-30), 403, "s ahead of the server's"),
        (PULL, lambda: request(b"stranger"), 403, "does not know this key"),
        (JOIN, lambda: request(b"stranger"), 403, "does not know this key"),
    ],
)
def test_a_request_is_let_in_only_from_a_known_key_with_a_right_clock(
    path: str, headers: Callable[[], dict[bytes, bytes]], status: int | None, words: str
) -> None:
    made = Guarded()
    guard, sent, pipe = gate.Gate(None, made), headers(), made.pipe
    refused = guard.refusal(path, sent, "10.0.0.9")
    assert (refused[0] if refused else None) == status
    assert words in (refused[1] if refused else "")
    assert all("refused 10.0.0.9" in note["text"] for note in pipe.heard)
    assert len(pipe.heard) == (status == 403)
    if "key" in words:
        guard.refusal(path, sent, "10.0.0.9")
        assert len(pipe.heard) == 1  # said once


def test_without_keys_a_stranger_may_register_but_do_nothing_else() -> None:
    guard = gate.Gate(None, Guarded(secure=False))
    assert guard.refusal("/v1/fleet/register-node", request(b"stranger"), "p") is None
    assert guard.refusal(JOIN, request(b"stranger"), "p") is None
    assert guard.refusal(PULL, request(b"stranger"), "p") is not None


class Response:
    def __init__(self, status: int, body: Any) -> None:
        self.status_code, self.body, self.text = status, body, str(body)

    def json(self) -> Any:
        if isinstance(self.body, str):
            raise ValueError
        return self.body


@pytest.mark.parametrize(
    ("joined", "status", "body", "kind", "words"),
    [
        (False, 403, {"refused": "key: the server does not know this key"}, verdicts.Refused, "does not know this key"),
        (False, 403, {"refused": "clock: it is 400 s behind"}, verdicts.Refused, "400 s behind"),
        (True, 403, {"refused": "clock: it is 400 s behind"}, verdicts.Away, "400 s behind"),
        (True, 403, {"refused": "key: the server does not know"}, verdicts.Unknown, "restarted"),
        (True, 401, "no", verdicts.Unknown, "restarted"),
        (True, 403, {"refused": "source: the request is for another node"}, verdicts.Unknown, "restarted"),
        (False, 401, "no", verdicts.Refused, "signature"),
        (False, 412, {"code": 2004}, verdicts.Away, "still regards this site as online"),
        (True, 413, {"refused": "size: a reply may have 5 bytes"}, verdicts.TooLarge, "5 bytes"),
        (True, 503, "busy", verdicts.Away, "503"),
        (True, 503, {"refused": "busy: other sites are sending"}, verdicts.Busy, "other sites"),
        (True, 410, {"refused": "late: the server does not wait"}, verdicts.Withdrawn, "does not wait"),
        (False, 403, {"refused": "version: it speaks 2"}, verdicts.Refused, "it speaks 2"),
        (True, 500, ["a list"], verdicts.Away, "500"),
    ],
)
def test_what_the_server_answers_decides_whether_a_site_tries_again(
    joined: bool, status: int, body: Any, kind: type[Exception], words: str
) -> None:
    made = verdicts.verdict(Response(status, body), joined)
    assert type(made) is kind
    assert words in str(made)


@pytest.mark.parametrize(
    ("joined", "text", "kind", "words"),
    [
        (False, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1)",
         verdicts.Refused, "not accepted: certificate has expired"),
        (True, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1)",
         verdicts.Away, "not accepted: certificate has expired"),
        (True, "[SSL: WRONG_VERSION_NUMBER]", verdicts.Refused, "does not use TLS"),
        (False, "connection refused", verdicts.Away, "cannot reach it"),
    ],
)  # fmt: skip
def test_a_site_that_takes_part_waits_for_a_certificate_to_be_renewed(
    joined: bool, text: str, kind: type[Exception], words: str
) -> None:
    made = verdicts.broken(text, joined, "cannot reach it")
    assert type(made) is kind
    assert words in str(made)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_strangers_who_hold_connections_meet_the_limit_of_the_system_not_a_lower_one() -> None:
    code = (
        "import resource as r; from fedskew.deploy.flower.connections import allow_many_connections\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, r.getrlimit(r.RLIMIT_NOFILE)[1])); allow_many_connections()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE)[0] == r.getrlimit(r.RLIMIT_NOFILE)[1] != 100"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# where Flower is


def test_flower_is_looked_for_in_the_named_environment_here_and_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("FEDSKEW_FLOWER", raising=False)
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fedskew\[flower\]'"):
        child.interpreter()
    python = tmp_path / "flower" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert child.interpreter() == str(python)
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(child, "version", lambda name: child.FLOWER)
    assert child.interpreter() == sys.executable
    monkeypatch.setattr(child, "version", lambda name: "1.0")
    with pytest.raises(UsageError, match=r"flwr 1\.0 is installed, but 1\.41\.0 is needed"):
        child.interpreter()
    monkeypatch.setenv("FEDSKEW_FLOWER", str(tmp_path / "flower"))
    assert child.interpreter() == str(python)
    monkeypatch.setenv("FEDSKEW_FLOWER", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"FEDSKEW_FLOWER=.*nowhere is invalid"):
        child.interpreter()


def test_the_pinned_version_is_the_extras() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'flower = ["flwr=={child.FLOWER}"]' in text


def test_a_child_ends_with_its_pipe_and_its_end_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Flower's side: it sends the first frame back, then waits for the end of its pipe."""
    (tmp_path / "__init__.py").touch()
    shutil.copy(Path(child.MODULES) / "frames.py", tmp_path)
    (tmp_path / "echo.py").write_text(
        "import os\nfrom .frames import Pipe\n"
        "def main():\n    pipe = Pipe()\n    print('to the log')\n    frame = pipe.receive()\n"
        "    frame[0]['telemetry'] = os.environ['FLWR_TELEMETRY_ENABLED']\n    pipe.send(*frame)\n    pipe.receive()\n"
    )
    monkeypatch.setattr(child, "MODULES", tmp_path)
    monkeypatch.setattr(child, "interpreter", lambda: sys.executable)
    made = FlowerProcess("echo", {"a": 1}, tmp_path / "log")
    assert made.receive(20) == ({"a": 1, "telemetry": "0"}, b"")
    with pytest.raises(queue.Empty):
        made.receive(0.01)
    made.send({"and": "end"})
    assert made.receive(5) is None
    assert made.receive(5) is None
    for _ in range(3):
        made.send({"too": "late"})
    made.close()
    assert made.process.returncode == 0
    assert "to the log" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_message_that_cannot_be_written_to_the_spool_is_an_error_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool is a file here, as a full disk would be: without an error the server would wait for ever."""
    (tmp_path / "__init__.py").touch()
    shutil.copy(Path(child.MODULES) / "frames.py", tmp_path)
    (tmp_path / "large.py").write_text(
        "from .frames import Pipe\ndef main():\n    pipe = Pipe()\n    pipe.receive()\n"
        "    pipe.send({}, bytes(2 << 20))\n    pipe.receive()\n"
    )
    (tmp_path / "spool").touch()
    monkeypatch.setattr(child, "MODULES", tmp_path)
    monkeypatch.setattr(child, "interpreter", lambda: sys.executable)
    made = FlowerProcess("large", {}, None, tmp_path / "spool")
    for _ in range(2):
        with pytest.raises(OSError, match="spool"):
            made.receive(20)
    made.close()


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "deaf.py").write_text("import time\ndef main():\n    time.sleep(100)\n")
    monkeypatch.setattr(child, "MODULES", tmp_path)
    monkeypatch.setattr(child, "interpreter", lambda: sys.executable)
    monkeypatch.setattr(child, "STOP_SECONDS", 0.2)
    made = FlowerProcess("deaf", {}, None)
    made.close()
    assert made.process.returncode == -9


# a site's side of the pipe


class Scripted:
    """Flower's carrier, as a list of what it tells."""

    def __init__(self, *frames: tuple[dict[str, Any], bytes]) -> None:
        self.frames, self.told, self.closed = list(frames), list[Any](), False

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        return self.frames.pop(0) if self.frames else None

    def send(self, header: dict[str, Any], blob: Any = b"") -> None:
        self.told.append(header)

    def close(self) -> None:
        self.closed = True


def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any], stay: bool = False
) -> tuple[Scripted, list[str]]:
    script, said = Scripted(*((event, b"") for event in events)), list[str]()
    monkeypatch.setattr(joining, "FlowerProcess", lambda role, config, log: script)
    site = Node("digits", States(tmp_path), name="north")
    try:
        joining.join(site, joining.ServerAddress("here:1", insecure=True), stay=stay, say=said.append)
    except UsageError as mistake:
        said.append(f"mistake: {mistake}")
    assert script.closed
    return script, said


DONE = {"event": "request", "header": {"kind": "done", "run": "0123456789abcdef", "data": "digits"}}
SETTINGS = {"method": {"name": "fedavg"}}
OTHER = {
    "event": "request",
    "header": {"kind": "hello", "run": "0123456789abcdef", "data": "mnist", "settings": SETTINGS},
}


def test_a_site_answers_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, trouble, arrived = {"event": "joined"}, {"event": "trouble", "text": "retrying"}, {"event": "delivered"}
    script, said = play(tmp_path, monkeypatch, joined, trouble, OTHER, arrived, DONE, arrived, OTHER)
    assert said[:2] == ["ready: joined here:1", "retrying"]
    assert "joined with --data digits" in said[2]
    assert "joined with other data" in said[3]
    assert said[4] == "the run is over"
    assert len(script.told) == 2
    assert len(script.frames) == 1


def test_a_site_leaves_even_if_its_last_word_does_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Scripted):
        def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], bytes] | None:
            if not self.frames:
                assert seconds == joining.LAST_REPLY_SECONDS
                raise queue.Empty
            return super().receive(seconds)

    said: list[str] = []
    monkeypatch.setattr(joining, "FlowerProcess", lambda role, config, log: Silent((DONE, b"")))
    joining.join(Node("digits", States(tmp_path)), joining.ServerAddress("here:1"), stay=False, say=said.append)
    assert said == ["the run is over"]


def test_what_cannot_be_recorded_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is a folder here, as a disk that is full or read-only would be."""
    (tmp_path / "audit.jsonl").mkdir()
    request = {"event": "request", "header": {"kind": "done", "run": "0123456789abcdef", "data": "digits"}}
    script, said = play(tmp_path, monkeypatch, request)
    assert "audit.jsonl cannot be written: Is a directory; a reply that is not recorded is not sent" in said[-1]
    assert script.told == []
    assert script.closed


def test_a_site_that_stays_waits_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, said = play(tmp_path, monkeypatch, DONE, {"event": "delivered"}, stay=True)
    assert not script.frames
    assert said == [f"mistake: the Flower process ended; see {tmp_path / 'flower.log'}."]


def test_a_site_that_is_refused_says_why_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = play(tmp_path, monkeypatch, {"event": "refused", "text": "the server does not know this key"})
    assert said == ["mistake: the server does not know this key."]


def test_one_process_has_a_sites_states(tmp_path: Path) -> None:
    lock = joining.lock_states(tmp_path / "state")
    with pytest.raises(UsageError, match="in use by another"):
        joining.lock_states(tmp_path / "state")
    lock.release()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        joining.lock_states(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("server", "folder", "insecure", "words"),
    [
        ("somewhere", None, True, "expected HOST:PORT"),
        (":80", None, True, "expected HOST:PORT"),
        ("a:b", None, True, "expected HOST:PORT"),
        ("a:1", "x", True, "exclude each other"),
        ("a:1", None, False, "or use --insecure"),
        ("a:1", "nowhere", False, "cannot be read"),
    ],
)
def test_a_site_must_say_how_it_gets_in(server: str, folder: str | None, insecure: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        server_address(server, Path(folder) if folder else None, insecure)


# the server's side


def test_a_server_must_say_who_gets_in(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="or use --insecure"):
        Hosting().keys()
    with pytest.raises(UsageError, match="exclude each other"):
        Hosting(certs=tmp_path, insecure=True).keys()
    with pytest.raises(UsageError, match=r"has no server\.crt"):
        Hosting(certs=tmp_path).keys()
    for name in ("server.crt", "server.key", "ca.crt"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="has no public key of a site"):
        Hosting(certs=tmp_path).keys()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([({"event": "failed", "text": "cannot listen on 1"}, b"")], "did not start: cannot listen on 1"),
        ([], "see .*log"),
    ],
)
def test_a_server_that_cannot_start_says_why(frames: list[Any], words: str, tmp_path: Path) -> None:
    script = Scripted(*frames)
    with pytest.raises(UsageError, match=words):
        Served(Experiment(), Hosting(insecure=True), tmp_path / "run", print, channel=lambda config, log: script)
    assert script.closed
    again = Played(nodes_in(tmp_path))
    Served(Experiment(), Hosting(insecure=True), tmp_path / "run2", print, channel=lambda config, log: again).close()


def test_the_end_of_flower_s_process_during_a_round_is_reported(tmp_path: Path) -> None:
    script = Scripted(({"event": "ready", "port": 1, "nodes": {}}, b""))
    run = Served(Experiment(), Hosting(insecure=True, sites=3), tmp_path / "run", print, channel=lambda c, log: script)
    with pytest.raises(UsageError, match="the Flower process ended"):
        list(run)
    nobody = Scripted(({"event": "ready", "port": 1, "nodes": {}}, b""))
    what = Experiment(data="sites")
    run = Served(what, Hosting(insecure=True), tmp_path / "b", print, channel=lambda c, log: nobody)
    with pytest.raises(UsageError, match="give the number of sites with --sites"):
        list(run)


def test_a_run_goes_on_only_with_its_own_sites(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="holds no run"):
        read_settings(tmp_path / "run")
    (tmp_path / "run" / "settings.toml").write_text(Experiment().to_toml())
    (tmp_path / "run" / "deployment.json").write_text('{"run": "00112233", "sites": ["a", "b"]}')
    keys = tmp_path / "keys"
    (keys / "sites").mkdir(parents=True)
    for name in ("server.crt", "server.key", "ca.crt", "sites/a.pub", "sites/c.pub"):
        (keys / name).touch()
    with pytest.raises(UsageError, match="started with the sites a, b"):
        Served(
            Experiment(), Hosting(certs=keys), tmp_path / "run", print, resume=True, channel=lambda c, log: Scripted()
        )


# the commands


def test_the_commands_say_what_is_wrong(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    for words, sentence in [
        (["serve"], "or use --insecure"),
        (["serve", "--choose", "some", "--insecure"], "--choose some is invalid: expected all or online."),
        (["serve", "--resume", "x", "--seed", "1", "--insecure"], "cannot be combined with other settings"),
        (["serve", "--resume", "x", "--insecure"], "x holds no run"),
        (["join", "--server", "a:1", "--data", "digits"], "or use --insecure"),
        (["join", "--server", "a:1", "--data", "digits", "--insecure"], "needs a --name"),
        (
            ["join", "--server", "a:1", "--data", "no.npz", "--insecure", "--name", "n"],
            "no.npz does not exist",
        ),
        (["certs", "--sites", "a b"], "site name 'a b' is invalid"),
        (["certs", "--sites", "server"], "and not 'server'"),
    ]:
        said = fedskew(*words)
        assert said.code == 2, words
        assert sentence in said.err, words


def test_serve_prints_that_it_is_ready_each_round_and_the_result(
    fedskew: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedskew.deploy.server as server

    monkeypatch.setattr(
        server, "FlowerProcess", lambda *given: Played(nodes_in(tmp_path, policy=ANY_FEDAVG), named=False)
    )
    data = few_digits(tmp_path)
    common = ["--insecure", "--data", data, "--split", "iid:clients=3", "--rounds", "2", "--timeout", "5"]
    said = fedskew("serve", *common, "--out", "one", "--json")
    assert said.code == 0
    assert "ready: http://127.0.0.1:1, waiting for 3 sites (any)" in said.err
    assert re.search(r"INFO    round 2/2: .*\d %", said.err)
    assert said.json()["sites"] == ["north", "south", "west"]
    again = fedskew("serve", "--resume", "one", "--insecure", "--timeout", "5")
    assert again.code == 0
    assert "resuming one after round 2 of 2" in again.out
    assert said.json()["digest"][:16] in again.out
    lost = fedskew("serve", *common, "--out", "two", "--quorum", "3", "--patience", "1", "--limit", "1")
    assert lost.code == 0


@pytest.mark.slow
def test_serve_ends_with_code_5_if_a_site_never_took_part(
    fedskew: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedskew.deploy.server as server

    def spoil(place: int, ask: Any, answer: Any, payload: bytes) -> Any:
        return None if place == 1 and ask["kind"] == "work" else (answer, payload)

    nodes = nodes_in(tmp_path, policy=ANY_FEDAVG)
    monkeypatch.setattr(server, "FlowerProcess", lambda *given: Played(nodes, spoil, named=False))
    common = ["--insecure", "--data", few_digits(tmp_path), "--split", "iid:clients=3", "--rounds", "1"]
    said = fedskew("serve", *common, "--timeout", "1", "--out", "run")
    assert said.code == 5
    assert "the run is complete, but these sites never took part: south." in said.err


def test_serve_that_is_stopped_or_left_alone_says_how_to_resume(
    fedskew: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedskew.deploy.server as server
    from fedskew.federation.protocol import QuorumLost

    monkeypatch.setattr(
        server, "FlowerProcess", lambda *given: Played(nodes_in(tmp_path, policy=ANY_FEDAVG), named=False)
    )
    for error, code, words in (
        (KeyboardInterrupt(), 130, "stopped; resume with"),
        (QuorumLost("few"), 3, "few. Nothing"),
    ):

        def fail(self: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(server.Served, "gather", fail)
        said = fedskew("serve", "--insecure", "--split", "iid:clients=3", "--out", f"run{code}")
        assert said.code == code
        assert f"{words}" in said.err
        assert f"fedskew serve --resume run{code}" in said.err


def test_join_takes_its_name_from_its_keys(
    fedskew: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "north").mkdir()
    for name in ("ca.crt", "site.key"):
        (tmp_path / "north" / name).write_text(name)
    seen: dict[str, Any] = {}

    def join(own: Node, door: joining.ServerAddress, *, stay: bool, say: Callable[[str], None]) -> None:
        seen.update(name=own.name, key=door.key, folder=own.states.folder)
        say("here")

    monkeypatch.setattr(joining, "join", join)
    said = fedskew("join", "--server", "a:1", "--data", "digits", "--certs", "north")
    assert said.code == 0
    assert seen == {"name": "north", "key": "site.key", "folder": Path("fedskew-state/north")}
    assert "fedskew: north: here" in said.err
    assert operations._words(" a, b,,") == ["a", "b"]


# with Flower itself


@needs_flower
@pytest.mark.slow
def test_keys_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    made = certs.make_certs(tmp_path, ["localhost", "127.0.0.1"], ["a"], 30)
    assert made == [tmp_path / "server", tmp_path / "a"]
    before = (tmp_path / "server" / "server.crt").read_bytes()
    certs.make_certs(tmp_path, [], ["b"], 30)
    assert (tmp_path / "server" / "server.crt").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "server" / "sites").iterdir()) == ["a.pub", "b.pub"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*") if path.is_dir()} == {0}
    with pytest.raises(UsageError, match="a key is not overwritten"):
        certs.make_certs(tmp_path, [], ["a"], 30)


@needs_flower
@pytest.mark.slow
def test_other_hosts_need_a_renewal_which_sites_with_the_old_authority_accept(tmp_path: Path) -> None:
    certs.make_certs(tmp_path, ["old.example"], ["a"], 30)
    folder = tmp_path / "server"
    before, authority = (folder / "server.crt").read_text(), (tmp_path / "a" / "ca.crt").read_text()
    with pytest.raises(UsageError, match=r"is for old\.example, not for new\.example.*fedskew certs renew"):
        certs.make_certs(tmp_path, ["new.example"], ["b"], 30)
    assert not (tmp_path / "b").exists()
    until, hosts = certs.renew(tmp_path, ["new.example"], 90)
    assert hosts == ["new.example"]
    assert 88 <= certs.days_left(until) <= 90
    assert (folder / "server.crt.old").read_text() == before
    assert (folder / "ca.crt").read_text() == authority
    assert shakes_hands(folder, tmp_path / "a" / "ca.crt", "new.example") == ""
    assert "old.example" in shakes_hands(folder, tmp_path / "a" / "ca.crt", "old.example")


def shakes_hands(server: Path, authority: Path, host: str) -> str:
    """Why a client that trusts the authority refuses this server under a host name; "" if it accepts it."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server / "server.crt", server / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(authority)).wrap_bio(down, up, server_hostname=host)
    ends = [client, theirs.wrap_bio(up, down, server_side=True)]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return str(error)
    return ""


@needs_flower
@pytest.mark.slow
def test_a_run_over_the_network_with_keys_has_the_bits_of_one_process(tmp_path: Path) -> None:
    """FedCRC: personal parts on the sites' disks, three sites, TLS; a stranger knocks meanwhile."""
    import parity

    differ, _ = parity.compare(tmp_path / "trial", "fedcrc", 2, stranger=True)
    assert differ == []


@needs_flower
@pytest.mark.slow
def test_a_method_and_a_net_of_a_file_give_one_digest_on_workers_on_ray_and_between_three_sites(
    fedskew: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method and net of the README. Each site has the file and allows both by name."""
    from trial import Trial

    (tmp_path / "my.py").write_text(MY)
    monkeypatch.chdir(tmp_path)
    words = ["--method", "my.py:Pull:mu=0.3", "--set", "model=my.py:net:width=8", "--rounds", "2", "--seed", "7"]
    words += ["--split", "dirichlet:alpha=0.5,clients=3", "--set", "privacy.min_count=5"]
    digests = {
        fedskew("run", *words, *engine, "--json").json()["digest"]
        for engine in (["--workers", "1"], ["--workers", "2"], ["--engine", "ray"])
    }
    assert len(digests) == 1
    with Trial(tmp_path / "trial") as trial:
        server, port = trial.serve(*words, "--out", str(tmp_path / "trial" / "run"))
        allow = ["--data", "digits", "--allow", "method=my.py:Pull", "--allow", "model=my.py:net"]
        for site in trial.sites:
            trial.join(site, port, *allow)
        assert server.end() == 0, server.output()
        assert trial.result("run")["digest"] in digests


LOST_RESPONSE = """
import sys, types
package = types.ModuleType("flower_side"); package.__path__ = [sys.argv[1]]; sys.modules["flower_side"] = package
import httpx
from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flower_side import carrier
from flower_side.frames import as_records, body_record

class Server:
    stored, cut = set(), True
    def PushMessages(self, request):
        names = [piece.object_id for piece in iterate_object_tree(request.message_object_trees[0])]
        self.names = set(names)
        return PushMessagesResponse(objects_to_push=[name for name in names if name not in self.stored])
    def PushObject(self, request):
        new = request.object_id not in self.stored
        self.stored.add(request.object_id)
        if self.cut:
            self.cut = False
            raise httpx.ReadError("the response is lost")
        return PushObjectResponse(stored=new)

site = object.__new__(carrier.Carrier)
site.client, site.node, site.config, site.last_note = Server(), Node(node_id=1), {"insecure": True, "server": "s"}, ""
site.joined = True
site.pipe = types.SimpleNamespace(send=lambda header: None)
carrier.time = types.SimpleNamespace(sleep=lambda seconds: None)
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
request = Message(as_records({"a": 1}, body_record(b"bytes")), 1, "train")
request.metadata.__dict__["_message_id"] = request.object_id
site.deliver(request, {"b": 2}, b"reply", seconds=1.0)
print(len(site.client.names), site.client.names == site.client.stored)
"""


@needs_flower
@pytest.mark.slow
def test_a_reply_is_complete_though_the_response_to_one_of_its_pieces_was_lost() -> None:
    """The site sends that piece again, the server does not take it twice; the other pieces still have to arrive."""
    command = [child.interpreter(), "-P", "-c", LOST_RESPONSE, str(child.MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pieces, complete = done.stdout.split()
    assert int(pieces) > 1
    assert complete == "True"
