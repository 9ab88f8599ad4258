"""What operators use: the status of a server and of a site, logs, keys that expire or are revoked, old states."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedskew.cli import logs
from fedskew.cli.logs import printer
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.deploy import certs, roster
from fedskew.deploy.agreed import read_agreed
from fedskew.deploy.audit import Audit
from fedskew.deploy.flower.bell import Bell
from fedskew.deploy.flower.frames import SPILL, read_frame, write_frame
from fedskew.deploy.flower.gate import BEHIND, NONCES, Gate, read_body, replayed
from fedskew.deploy.messages import Answer
from fedskew.deploy.states import States
from fedskew.deploy.status import read_status
from fedskew.experiment.config import Experiment
from fedskew.federation.norms import norms_of, outliers
from sites import served

SPLIT = "iid:clients=3"
FEW = Experiment(split=SPLIT, rounds=2, training=Training(batch_size=64))


# status


def test_the_status_of_a_run_shows_rounds_sites_and_refusals(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    between, played = served(FEW, tmp_path)
    rounds = iter(between)
    played.told.put(({"event": "note", "text": "refused 10.0.0.9: its clock is 900 s behind"}, b""))
    next(rounds)
    found = fedskew("status", str(tmp_path / "run"), "--json").json()
    assert (found["kind"], found["running"], found["round"], found["rounds"]) == ("server", True, 1, 2)
    assert found["pid"] == os.getpid()
    assert [(site["name"], site["online"], site["agreed"]) for site in found["sites"]] == [
        ("north", True, True),
        ("south", True, True),
        ("west", True, True),
    ]
    assert "its clock is 900 s behind" in found["refusals"][0]
    played.told.put(({"event": "nodes", "online": [100, 102]}, b""))
    between.roster.handle_next(1.0)
    assert [site["online"] for site in read_status(tmp_path / "run")["sites"]] == [True, False, True]
    played.told.put(({"event": "nodes", "online": [100, 101, 102]}, b""))
    between.roster.handle_next(1.0)
    assert found["disk"]["free"] > 0
    said = fedskew("status", str(tmp_path / "run"))
    assert "round 1 of 2" in said.out
    assert "  west: online" in said.out
    list(rounds)
    over = read_status(tmp_path / "run")
    assert not over["running"]
    assert not any(site["online"] for site in over["sites"])


def test_the_status_of_a_killed_server_says_that_it_is_not_running(tmp_path: Path) -> None:
    between, _ = served(FEW, tmp_path)
    next(iter(between))
    path = tmp_path / "run" / "status.json"
    path.write_text(path.read_text().replace(f'"pid":{os.getpid()}', '"pid":999999999'))
    assert not read_status(tmp_path / "run")["running"]


def test_the_status_of_a_site_shows_what_left_it(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    between, played = served(FEW, tmp_path)
    list(between)
    site = played.nodes[0]
    answer, payload = site.reply(played.asked[0][1], b"")
    site.audit.record("here:1", "hello", answer, payload)
    found = fedskew("status", str(site.states.folder), "--json").json()
    assert (found["kind"], found["replies"], found["bytes"]) == ("site", 1, 0)
    assert len(found["accepted"]) == 1
    assert found["last"]["kind"] == "hello"
    assert "1 replies" in fedskew("status", str(site.states.folder)).out


def test_a_folder_that_holds_neither_is_a_mistake(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    said = fedskew("status", str(tmp_path))
    assert said.code == 2
    assert "neither the directory of a served run nor" in said.err
    (tmp_path / "status.json").write_text("{")
    assert fedskew("status", str(tmp_path)).code == 2


# states


def test_old_states_are_removed_and_new_ones_kept(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    states = States(tmp_path / "state")
    states.put("aaaaaaaa", 0, b"old")
    states.put("bbbbbbbb", 0, b"new")
    then = time.time() - 40 * 86400
    for path in (tmp_path / "state" / "aaaaaaaa").iterdir():
        os.utime(path, (then, then))
    said = fedskew("forget", str(tmp_path / "state"))
    assert said.code == 0
    assert "removed the state of run aaaaaaaa" in said.out
    assert list(states.runs()) == ["bbbbbbbb"]
    assert "no state" in fedskew("forget", str(tmp_path / "state")).out
    assert fedskew("forget", str(tmp_path / "nowhere")).code == 2


# logs


def test_lines_have_time_and_level_and_cannot_be_forged(tmp_path: Path) -> None:
    stream = io.StringIO()
    say = printer(stream, tmp_path / "logs" / "server.log", "fedskew: ")
    say("ready")
    say("warning: site x\x1b[2J\n2026-01-01T00:00:00Z INFO round 9/9")
    first, second = stream.getvalue().splitlines()
    assert first[10] == "T"
    assert first[19:] == "Z INFO    fedskew: ready"
    assert "Z WARNING fedskew: site x?[2J?2026-01-01" in second
    assert (tmp_path / "logs" / "server.log").read_text() == stream.getvalue()
    with pytest.raises(UsageError, match="--log-file"):
        printer(stream, tmp_path / "logs" / "server.log" / "below")


def test_a_log_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LARGEST", 200)
    monkeypatch.setattr(logs, "KEPT", 2)
    say = printer(io.StringIO(), tmp_path / "a.log")
    for _ in range(50):
        say("a line of the log")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 200


# certificates


@pytest.mark.parametrize(("days", "words"), [(400, ""), (29, "expires in 2"), (-1, "has expired")])
def test_certificates_are_warned_of_a_month_before_they_expire(days: int, words: str) -> None:
    until = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    warning = certs.expiry_warning("server.crt", until)
    assert bool(warning) == bool(words)
    assert words in warning


def test_a_server_warns_of_its_certificates_once_a_day(tmp_path: Path) -> None:
    said: list[str] = []
    between, _ = served(FEW, tmp_path, said=said)
    until = (datetime.now(UTC) + timedelta(days=5)).isoformat()
    between.certificates = certs.Certificates({"server.crt": until})
    list(between)
    assert len([line for line in said if "server.crt expires in" in line]) == 1


def test_a_site_is_revoked_by_name(tmp_path: Path) -> None:
    (tmp_path / "server" / "sites").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "server" / "sites" / f"{name}.pub").touch()
    with pytest.raises(UsageError, match=r"has no key of a site c; it has: a, b"):
        certs.revoke(tmp_path, ["c"])
    assert certs.revoke(tmp_path, ["a"]) == [tmp_path / "server" / "sites" / "a.revoked"]
    assert certs.revoke(tmp_path / "server", ["b"])[0].exists()


def test_a_resumed_run_leaves_out_a_site_whose_key_was_revoked(tmp_path: Path) -> None:
    (tmp_path / "deployment.json").write_text('{"run": "00112233", "sites": ["a", "b"]}')
    agreed, notes = read_agreed(tmp_path, ["a"], "", resume=True)
    assert agreed.sites == ["a", "b"]
    assert notes == ["the keys of b were revoked: these sites are left out"]
    assert read_agreed(tmp_path, ["a", "b"], "", resume=True)[1] == []
    with pytest.raises(UsageError, match="started with the sites a, b"):
        read_agreed(tmp_path, ["a", "c"], "", resume=True)


def test_the_commands_for_keys_say_what_is_wrong(fedskew: Callable[..., Any], tmp_path: Path) -> None:
    for words, sentence in [
        (["certs", "burn"], "expected make or renew or revoke"),
        (["certs"], "certs make needs --sites"),
        (["certs", "revoke"], "certs revoke needs --sites"),
        (["certs", "renew", "--out", "nowhere"], "expects the folder with ca.key"),
        (["certs", "revoke", "--sites", "a", "--out", "nowhere"], "has no key of a site a; it has: none"),
    ]:
        said = fedskew(*words)
        assert said.code == 2, words
        assert sentence in said.err, words


# the server's own parts


def test_a_large_reply_waits_on_disk(tmp_path: Path) -> None:
    stream = io.BytesIO()
    write_frame(stream, {"n": 1}, bytes(SPILL + 5))
    write_frame(stream, {"n": 2}, b"small")
    stream.seek(0)
    first, second = read_frame(stream, tmp_path / "spool"), read_frame(stream, tmp_path / "spool")
    assert first is not None
    assert isinstance(first[1], Path)
    assert first[1].stat().st_size == SPILL + 5
    assert second == ({"n": 2}, b"small")
    whole = stream.getvalue()
    assert read_frame(io.BytesIO(whole[: SPILL // 2]), tmp_path / "spool") is None


def test_a_suspended_server_gives_its_sites_their_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(roster.time, "monotonic", lambda: clock[0])
    timer = roster.Timer(10.0)
    clock[0] += 1.0
    assert timer.remaining() == 9.0
    clock[0] += 75.0
    assert timer.remaining() == 6.0


def test_a_request_is_new_once() -> None:
    async def ask() -> list[bool]:
        gate = Gate(None, SimpleNamespace())  # type: ignore[arg-type]
        first = [gate._is_new(b"key", nonce) for nonce in (b"1", b"2", b"1")]
        other = gate._is_new(b"other key", b"1")
        gate.seen[b"key"] |= {str(n).encode(): 1e18 for n in range(NONCES)}
        return [*first, other, gate._is_new(b"key", b"new"), gate._is_new(b"key 3", b"x" * 65)]

    assert asyncio.run(ask()) == [True, True, False, True, False, False]


def test_a_request_is_remembered_as_long_as_its_time_stamp_is_accepted() -> None:
    """A time stamp may be 300 s old: a nonce of 299 s ago is still known, one of ten minutes ago is forgotten."""

    async def ask() -> list[bool]:
        gate, now = Gate(None, SimpleNamespace()), asyncio.get_running_loop().time()  # type: ignore[arg-type]
        gate.seen[b"key"] = OrderedDict({b"forgotten": now - 600, b"known": now - BEHIND + 1})
        return [gate._is_new(b"key", b"known"), gate._is_new(b"key", b"forgotten")]

    assert asyncio.run(ask()) == [False, True]


def test_a_body_has_the_length_that_its_head_says() -> None:
    def receiver(*parts: bytes) -> Any:
        waiting = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]

        async def receive() -> Any:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        return receive

    assert asyncio.run(read_body(receiver(b"ab", b"c"), 3)) == b"abc"
    assert asyncio.run(read_body(receiver(b"ab", b"c"), 2)) is None
    assert asyncio.run(read_body(receiver(b"ab"), 3)) is None
    assert asyncio.run(read_body(receiver(), 3)) is None
    assert asyncio.run(replayed(b"x", receiver())())["body"] == b"x"


def test_a_bell_wakes_those_who_wait_and_nobody_else() -> None:
    async def play() -> list[str]:
        bell, woken = Bell(), []
        bell.ring()  # nobody waits

        async def wait(name: str, seconds: float) -> None:
            began = asyncio.get_running_loop().time()
            await bell.wait(seconds)
            woken.append(f"{name} {'early' if asyncio.get_running_loop().time() - began < seconds / 2 else 'late'}")

        tasks = [asyncio.ensure_future(wait("a", 5.0)), asyncio.ensure_future(wait("b", 5.0))]
        await asyncio.sleep(0.05)
        bell.ring()
        await asyncio.gather(*tasks)
        await wait("c", 0.05)
        return woken

    assert asyncio.run(play()) == ["a early", "b early", "c late"]


# norms


def test_norms_are_compared_with_the_median_of_the_round() -> None:
    """Norms 1, 2, 3 and 500: the lower median is 2, so 500 is 250 times the usual."""
    norms = {c: {"g": float(n)} for c, n in enumerate((1, 2, 3, 500))}
    assert list(outliers(norms, {}, 249)) == [3]
    assert outliers(norms, {}, 251) == {}
    assert outliers(norms, {}, 0) == {}
    assert outliers(norms, {"g": 10.0}, 100) == {}  # the broadcast is the usual then


def test_with_two_clients_a_tiny_update_does_not_shut_out_the_other() -> None:
    assert outliers({0: {"w": 1e-9}, 1: {"w": 5.0}}, {"w": 5.0}, 100) == {}
    assert list(outliers({0: {"w": 5e30}, 1: {"w": 5.0}}, {"w": 5.0}, 100)) == [0]
    assert list(outliers({0: {"w": 5e30}}, {"w": 5.0}, 100)) == [0]
    assert outliers({0: {"w": 5e30}}, {}, 100) == {}  # nothing to compare with


def test_a_group_that_few_clients_fill_is_compared_among_these() -> None:
    norms = {0: {"p": 0.0}, 1: {"p": 0.0}, 2: {"p": 0.0}, 3: {"p": 2.0}, 4: {"p": 3.0}}
    assert outliers(norms, {}, 100) == {}


def test_a_norm_is_over_all_tensors_of_a_group_and_does_not_overflow() -> None:
    import torch

    from fedskew.core.tensors import Tensors

    payload = {"g": Tensors(a=torch.tensor([3e30]), b=torch.tensor([4e30])), "n": Tensors(count=torch.tensor([3, 4]))}
    assert norms_of(payload) == pytest.approx({"g": 5e30, "n": 5.0})


def test_the_audit_is_json_lines(tmp_path: Path) -> None:
    between, played = served(FEW, tmp_path)
    next(iter(between))
    for _ in range(2):
        answer, payload = played.nodes[0].reply(played.asked[0][1], b"")
        played.nodes[0].audit.record("here:1", "hello", answer, payload)
    played.nodes[0].audit.record("here:1", "work", answer, b"no payload")
    lines = [json.loads(line) for line in played.nodes[0].audit.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["hello", "hello", "work"]
    assert lines[2]["groups"] == {"unknown": 10}


def test_a_line_of_the_audit_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.record("here:1", "hello", Answer(), b"")
    with audit.path.open("ab") as file:
        file.write(b'{"time": "2026')
    audit.record("here:1", "work", Answer(), b"")
    lines = audit.path.read_text().splitlines()
    assert [json.loads(lines[place])["kind"] for place in (0, 2)] == ["hello", "work"]
    assert read_status(tmp_path)["replies"] == 2


@pytest.mark.parametrize("name", ["fedskew-site@.service", "fedskew-server.service", "Containerfile"])
def test_the_units_and_the_container_file_use_options_that_exist(fedskew: Callable[..., Any], name: str) -> None:
    text = (Path(__file__).parents[2] / "packaging" / name).read_text()
    command = "serve" if "server" in name else "join"
    help_text = fedskew(command, "--help").out
    used = set(re.findall(r"(--[a-z-]+)", text[text.index(f"{command} --") :].splitlines()[0]))
    assert len(used) >= 3
    assert all(option in help_text for option in used)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["fedskew-site@.service", "fedskew-server.service"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, name: str) -> None:
    text = (Path(__file__).parents[2] / "packaging" / name).read_text()
    unit = tmp_path / name.replace("@", "@hospital-a")
    unit.write_text(text.replace("/opt/fedskew/bin/fedskew", "/bin/true"))  # which is not installed here
    verify = ["systemd-analyze", "verify", "--man=no"]
    done = subprocess.run([*verify, str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nResart=always"))
    done = subprocess.run([*verify, str(unit)], capture_output=True, text=True, check=False)
    assert "Resart" in done.stderr
