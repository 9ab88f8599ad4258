"""What `fedskew status` shows: of a server's run, and of a site's folder of states."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.settings import UsageError
from fedskew.deploy.audit import FILE as AUDIT
from fedskew.deploy.policy import ACCEPTED
from fedskew.deploy.states import States

STATUS = "status.json"  # in a run's directory; the server writes it after every round and change


class SiteStatus(msgspec.Struct):
    """One site as the server sees it."""

    name: str
    online: bool
    agreed: bool  # whether it answered the greeting of this server process
    lost: str = ""  # why its update of the last round was not used
    seen: str = ""  # when it was last known to be online; "": never


class Status(msgspec.Struct):
    """A server and its run."""

    address: str
    pid: int  # of the server; 0: it has ended
    run: str
    round: int  # rounds that are finished
    rounds: int
    sites: list[SiteStatus]
    refusals: list[str]  # the last ones, with their time
    certificates: dict[str, str] = {}  # name -> until when it is valid
    time: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def read_status(folder: Path) -> dict[str, Any]:
    """The status of the run or the site in a folder, as plain values; UsageError if it holds neither."""
    if (folder / STATUS).exists():
        return _server_status(folder)
    if (folder / AUDIT).exists() or (folder / ACCEPTED).exists():
        return _site_status(folder)
    raise UsageError(
        f"{folder} is neither the directory of a served run nor the --state folder of a site: it has no {STATUS} "
        f"and no {AUDIT}."
    )


def _server_status(folder: Path) -> dict[str, Any]:
    return read_server_status(folder) | {"disk": disk(folder)}


def read_server_status(folder: Path) -> dict[str, Any]:
    """The status of the served run in a folder, without the disk's, which takes longer."""
    try:
        status = msgspec.json.decode((folder / STATUS).read_bytes(), type=Status)
    except ValueError as error:
        raise UsageError(f"{folder / STATUS} cannot be read: {error}.") from None
    running = _alive(status.pid)
    plain: dict[str, Any] = msgspec.to_builtins(status)
    if not running:
        plain["sites"] = [site | {"online": False} for site in plain["sites"]]
    return {"kind": "server", "running": running} | plain


def _site_status(folder: Path) -> dict[str, Any]:
    try:
        accepted = json.loads((folder / ACCEPTED).read_bytes()) if (folder / ACCEPTED).exists() else {}
        lines = (folder / AUDIT).read_text().splitlines() if (folder / AUDIT).exists() else []
        sent = [json.loads(line) for line in lines if line.endswith("}")]
    except ValueError as error:
        raise UsageError(f"{folder} cannot be read: {error}.") from None
    return {
        "kind": "site",
        "accepted": accepted,
        "replies": len(sent),
        "bytes": sum(entry["bytes"] for entry in sent),
        "last": sent[-1] if sent else None,
        "runs": States(folder).runs(),
        "disk": disk(folder),
    }


def disk(folder: Path) -> dict[str, int]:
    """Bytes that the folder uses, and that are free on its disk."""
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"used": used, "free": shutil.disk_usage(folder).free}


def iso_time(seconds: float | None) -> str:
    """A time in seconds since 1970 in ISO form; None gives ""."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _alive(pid: int) -> bool:
    """Whether a process exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
