"""The options of a server: its address, its keys, and how long it waits for sites."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedskew.core.settings import UsageError
from fedskew.deploy.flower.frames import Header


@dataclass(frozen=True)
class Hosting:
    """The options of `fedskew serve` that do not change the result of a run."""

    host: str = "127.0.0.1"  # the address to listen on
    port: int = 8470  # 0: a free port
    certs: Path | None = None  # the server's folder of keys; needed unless `insecure`
    insecure: bool = False  # no TLS, and any site may join
    sites: int = 0  # how many sites there are; 0: as many as keys, or as clients in the split
    timeout: float = 600.0  # seconds a round waits for replies
    grace: float = 30.0  # seconds a site may be offline before a round goes on without it
    patience: float = 600.0  # seconds to wait for the sites to join at the start
    limit: int = 2 << 30  # the largest reply, in bytes
    norm_bound: float = 1000.0  # an update of more than this times the round's usual norm is refused; 0: none is
    profile: bool = False  # ask sites that bring their own data for their label counts
    choose: Literal["all", "online"] = "all"  # the sites a cohort is drawn from
    server_data: str = ""  # if sites bring their own data: the server's test set and public data; "": none
    data_dir: Path | None = None  # where named data sets are; None: the default folder

    def keys(self) -> dict[str, str]:
        """Site name -> public key (PEM text); empty if insecure."""
        if self.insecure:
            if self.certs is not None:
                raise UsageError("--insecure and --certs exclude each other: give one of them.")
            return {}
        if self.certs is None:
            raise UsageError("give the server's folder of keys with --certs (see `fedskew certs`), or use --insecure.")
        public_keys = {path.stem: path.read_text() for path in sorted((self.certs / "sites").glob("*.pub"))}
        for name in ("server.crt", "server.key", "ca.crt"):
            if not (self.certs / name).exists():
                raise UsageError(
                    f"{self.certs} has no {name}; --certs expects the server's folder (see `fedskew certs`)."
                )
        if not public_keys:
            raise UsageError(f"{self.certs / 'sites'} has no public key of a site (NAME.pub).")
        return public_keys

    def config(self) -> Header:
        """The first message to deploy/flower/link.py."""
        certs = self.certs or Path()
        return {
            "host": self.host,
            "port": self.port,
            "limit": self.limit,
            "grace": self.grace,
            "secure": not self.insecure,
            "sites": self.keys(),
            "certificate": str(certs / "server.crt"),
            "key": str(certs / "server.key"),
            "keys": str(certs / "sites"),
        }
