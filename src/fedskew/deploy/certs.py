"""`fedskew certs`: creates a certificate authority, the server's certificate, and a key for each site.

    <out>/ca.key                         the authority's private key; not needed in a run, keep it off the network
    <out>/server/                        ca.crt server.crt server.key sites/NAME.pub      for `fedskew serve --certs`
    <out>/NAME/                          ca.crt site.key                                  for `fedskew join --certs`

Called again with further sites, it adds their keys. The server needs only the public key NAME.pub of a site, so a
site may also create its own key pair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.deploy.flower_process import FlowerProcess


def make_certs(out: Path, hosts: Sequence[str], sites: Sequence[str], days: int) -> list[Path]:
    """Create keys and certificates in `out`; returns the folder of the server, then those of the sites.

    `hosts` are the names and addresses of the server; they are ignored if `out` has a server certificate already.
    `sites` are the names of new sites, and `days` is how long the certificates are valid. Existing files are never
    overwritten.
    """
    if bad := [name for name in sites if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or name == "server"]:
        raise UsageError(
            f"site name {bad[0]!r} is invalid: expected letters, digits, '.', '-' and '_', and not 'server'."
        )
    if existing := [name for name in sites if (out / name).exists()]:
        raise UsageError(f"{out / existing[0]} exists already: a key is not overwritten; give another name or --out.")
    has_server = (out / "server" / "server.crt").exists()
    config = {"hosts": [] if has_server else list(hosts), "sites": list(sites), "days": days}
    process = FlowerProcess("keys", config, None)
    frame = process.receive(60)
    process.close()
    if frame is None:
        raise UsageError("the keys could not be created: Flower's cryptography package failed to start.")
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
    """Create a file that only its owner can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
