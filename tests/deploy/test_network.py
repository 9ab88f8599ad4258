"""Attacks over HTTP on the server that sites connect to: see attacks.py, which runs in Flower's interpreter."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.deploy import flower_process


def has_flower() -> bool:
    with contextlib.suppress(UsageError):
        return bool(flower_process.interpreter())
    return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_flower(), reason="Flower is not installed (`make test` installs it)"),
]


@cache
def attacked() -> dict[str, Any]:
    """What each attack came to."""
    script = Path(__file__).with_name("attacks.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [flower_process.interpreter(), "-P", str(script), str(flower_process.MODULES), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_site_cannot_read_delete_or_answer_the_messages_of_another() -> None:
    found = attacked()
    assert "Withdrawn" in found["read"]
    assert found["kept"]
    assert found["forged"] == found["other node"] == "Unknown: the server was restarted"
    assert found["notes"] == ["source: the reply is of another node", "source: the request is for another node"]


def test_a_request_cannot_be_repeated_or_changed() -> None:
    found = attacked()
    assert found["repeated"][0] == 403
    assert "came before" in found["repeated"][1]
    assert (found["new nonce"], found["changed"], found["elsewhere"]) == (401, 401, 401)


def test_a_reply_that_names_a_chunk_many_times_is_not_put_together() -> None:
    assert "bytes, the limit is 1000" in attacked()["bomb"]


def test_a_reply_is_bounded_by_what_is_expected_and_an_honest_one_arrives() -> None:
    found = attacked()
    assert "TooLarge" in found["large"]
    assert found["honest"] == [[2, {"ok": 1}, 500]]
    assert found["left"] == 0


def test_a_request_for_messages_waits_until_there_is_one() -> None:
    found = attacked()
    assert found["waits"]
    assert found["woken"] == 1
    assert found["once more"] == 1
    assert found["kept for the next"] == [""]


def test_idle_and_dripping_connections_are_closed() -> None:
    assert attacked()["ended"] == ["drip", "silent"]


def test_a_revoked_key_is_refused_during_a_run() -> None:
    found = attacked()
    assert "does not know this key" in found["revoked"]
    assert found["others"]


def test_a_suspended_server_does_not_give_up_its_run_or_its_sites() -> None:
    found = attacked()
    assert found["task"] == [True]
    assert found["suspended"] == []
