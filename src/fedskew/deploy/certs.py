"""`fedskew certs`: a certificate authority, a server's certificate and keys of sites, ready to be handed out.

    <out>/ca.key                         signs further certificates; keep it off the network
    <out>/server/                        ca.crt server.crt server.key sites/NAME.pub      for `fedskew serve --certs`
    <out>/NAME/                          ca.crt site.key                                  for `fedskew join --certs`

A site that makes its own key hands in NAME.pub only. Run again with more sites, it adds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.deploy.child import Child


def make_certs(out: Path, hosts: Sequence[str], sites: Sequence[str], days: int) -> list[Path]:
    """The folders made. What is there already stays: a key is never overwritten."""
    if bad := [name for name in sites if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or name == "server"]:
        raise UsageError(f"site name {bad[0]!r} will not do: letters, digits, dots and dashes, and not 'server'.")
    if there := [name for name in sites if (out / name).exists()]:
        raise UsageError(f"{out / there[0]} is there already: a key is not overwritten; give another name or --out.")
    known = out / "server" / "server.crt"
    asked = {"hosts": [] if known.exists() else list(hosts), "sites": list(sites), "days": days, "ca": None}
    child = Child("keys", asked, None)
    frame = child.hear(60)
    child.close()
    if frame is None:
        raise UsageError("the keys could not be made: Flower's cryptography failed to start.")
    made = frame[0]
    if "ca" in made:
        _write(out / "ca.key", made["ca"]["key"])
        _write(out / "server" / "ca.crt", made["ca"]["certificate"])
        _write(out / "server" / "server.key", made["server"]["key"])
        _write(out / "server" / "server.crt", made["server"]["certificate"])
    authority = (out / "server" / "ca.crt").read_text()
    for name, pair in made["sites"].items():
        _write(out / "server" / "sites" / f"{name}.pub", pair["public"])
        _write(out / name / "ca.crt", authority)
        _write(out / name / "site.key", pair["key"])
    return [out / "server", *(out / name for name in sites)]


def _write(path: Path, text: str) -> None:
    """For its owner's eyes only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
