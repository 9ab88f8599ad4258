"""`fedskew certs`: creates a certificate authority, the server's certificate, and a key for each site.

    <out>/ca.key                         the authority's private key; not needed in a run, keep it off the network
    <out>/server/                        ca.crt server.crt server.key sites/NAME.pub      for `fedskew serve --certs`
    <out>/NAME/                          ca.crt site.key                                  for `fedskew join --certs`

Called again with further sites, it adds their keys. `renew` replaces the server's certificate, `revoke` shuts a site
out. The server needs only the public key NAME.pub of a site, so a site may also create its own key pair.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.flower_process import FlowerProcess

SOON = 30  # days before the end of a certificate, from which on it is warned of
LOCAL = ("localhost", "127.0.0.1")  # hosts of a trial on one machine
REVOKED = ".revoked"  # what the file of a key is called after it was revoked


def make_certs(out: Path, hosts: Sequence[str], sites: Sequence[str], days: int) -> list[Path]:
    """Create keys and certificates in `out`; returns the folder of the server, then those of the sites.

    `hosts` are the names and addresses of the server; none: those of the certificate that is there, or of this machine.
    `sites` are the names of new sites, and `days` is how long the server's certificate is valid. Existing files are
    never overwritten.
    """
    if bad := [name for name in sites if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or name == "server"]:
        raise UsageError(
            f"site name {bad[0]!r} is invalid: expected letters, digits, '.', '-' and '_', and not 'server'."
        )
    if existing := [name for name in sites if (out / name).exists()]:
        raise UsageError(f"{out / existing[0]} exists already: a key is not overwritten; give another name or --out.")
    certificate = out / "server" / "server.crt"
    if certificate.exists() and hosts and set(valid := _inspect(certificate)["hosts"]) != set(hosts):
        raise UsageError(
            f"{certificate} is for {', '.join(valid)}, not for {', '.join(hosts)}: to change it, use "
            f"`fedskew certs renew --out {out} --hosts {','.join(hosts)}`."
        )
    new_hosts = [] if certificate.exists() else list(hosts or LOCAL)
    made = _ask({"do": "make", "hosts": new_hosts, "sites": list(sites), "days": days})
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


def renew(out: Path, hosts: Sequence[str], days: int) -> tuple[str, list[str]]:
    """Replace the server's key and certificate, signed by the same authority: sites notice nothing.

    `hosts` are those of the new certificate; none: the same as before. The old files get the suffix .old. Returns until
    when the new one is valid, and its hosts.
    """
    folder = out / "server"
    try:
        texts = {"ca_key": (out / "ca.key").read_text(), "ca_certificate": (folder / "ca.crt").read_text()}
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {error.strerror}; --out expects the folder with ca.key and server/."
        ) from None
    valid = list(hosts) or _inspect(folder / "server.crt")["hosts"] or list(LOCAL)
    made = _ask({"do": "renew", "hosts": valid, "days": days, **texts})["server"]
    for name, text in (("server.key", made["key"]), ("server.crt", made["certificate"])):
        path = folder / name
        if path.exists():
            path.replace(path.with_name(name + ".old"))
        _write(path, text)
    return _inspect(folder / "server.crt")["until"], valid


def revoke(out: Path, sites: Sequence[str]) -> list[Path]:
    """Revoke the keys of sites: a running server refuses them within seconds. Returns the files, renamed.

    `out` is the folder of `fedskew certs`, or the server's folder in it.
    """
    folder = out / "sites" if (out / "sites").is_dir() else out / "server" / "sites"
    if missing := [name for name in sites if not (folder / f"{name}.pub").exists()]:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.pub"))) or "none"
        raise UsageError(f"{folder} has no key of a site {missing[0]}; it has: {known}.")
    return [(folder / f"{name}.pub").rename(folder / f"{name}{REVOKED}") for name in sites]


def _inspect(path: Path) -> Header:
    """{"until", "hosts"} of a certificate."""
    try:
        return _ask({"do": "inspect", "certificate": path.read_text()})
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _ask(config: Header) -> Header:
    """What deploy/flower/keys.py answers."""
    process = FlowerProcess("keys", config, None)
    frame = process.receive(60)
    process.close()
    if frame is None:
        raise UsageError("the keys could not be made: Flower's cryptography package failed to start.")
    if "failed" in frame[0]:
        raise UsageError(f"the keys could not be made: {frame[0]['failed']}.")
    return frame[0]


def days_left(until: str) -> int:
    """Days until a time in ISO form; negative if it has passed."""
    return (datetime.fromisoformat(until) - datetime.now(UTC)).days


def expiry_warning(name: str, until: str) -> str:
    """A sentence if a certificate expires within `SOON` days; "" if it does not."""
    left = days_left(until)
    if left >= SOON:
        return ""
    when = f"expires in {left} days" if left >= 0 else "has expired"
    return f"warning: {name} {when} ({until[:10]}); see `fedskew certs renew`"


class Certificates:
    """The certificates that a server uses: `until` maps their names to the time until which they are valid."""

    def __init__(self, until: Mapping[str, str]) -> None:
        self.until = dict(until)
        self.warned = ""  # day of the last warnings

    def warnings(self) -> list[str]:
        """Sentences about those that expire soon, once a day; otherwise none."""
        if self.warned == (today := time.strftime("%F")):
            return []
        self.warned = today
        return [warning for entry in self.until.items() if (warning := expiry_warning(*entry))]


def _write(path: Path, text: str) -> None:
    """Create a file that only its owner can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
