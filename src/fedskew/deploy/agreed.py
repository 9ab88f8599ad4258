"""What a server and its sites agreed on at the start of a run, in the run's directory."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedskew.core.settings import UsageError
from fedskew.deploy.messages import Task

FILE = "deployment.json"


class Agreed(msgspec.Struct):
    """What server and sites agreed on at the start of a run, besides its settings: deployment.json."""

    run: str  # identifies the run in every request; hexadecimal
    sites: list[str]  # names, in the order of their client numbers
    task: Task | None = None  # if sites bring their own data
    server_data: str = ""  # see Hosting
    samples: dict[str, int] = {}  # training samples that sites reported, by name, if they bring their own data
    counts: dict[str, dict[str, int]] = {}  # label counts of the sites that told them: site -> class -> samples


def read_agreed(out: Path, keys: Sequence[str], server_data: str, *, resume: bool) -> tuple[Agreed, list[str]]:
    """(what was agreed when the run in `out` started, notes for the operator); for a new run what is known so far.

    `keys` are the names of the sites whose keys the server has; `server_data` see Hosting.
    """
    if not resume or not (out / FILE).exists():
        return Agreed(secrets.token_hex(8), list(keys), server_data=server_data), []
    agreed = msgspec.json.decode((out / FILE).read_bytes(), type=Agreed)
    if not set(keys) <= set(agreed.sites):
        raise UsageError(
            f"the run was started with the sites {', '.join(agreed.sites)}, but --certs has keys of "
            f"{', '.join(keys)}; give the folder that the run was started with."
        )
    if revoked := [name for name in agreed.sites if keys and name not in keys]:
        return agreed, [f"the keys of {', '.join(revoked)} were revoked: these sites are left out"]
    return agreed, []
