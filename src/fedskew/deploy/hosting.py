"""How a server is reached, whose keys it knows, and how long it waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedskew.core.settings import UsageError
from fedskew.deploy.flower.frames import Header


@dataclass(frozen=True)
class Hosting:
    """How the server is reached, and how long it waits for whom."""

    host: str = "127.0.0.1"
    port: int = 8470
    certs: Path | None = None
    insecure: bool = False
    sites: int = 0  # how many there are; with keys, as many as there are keys
    timeout: float = 600.0  # seconds for a round
    patience: float = 600.0  # seconds to wait for the sites at the start
    limit: int = 2 << 30  # bytes of a reply
    choose: Literal["all", "online"] = "all"  # whom a cohort is drawn from
    server_data: str = ""  # the server's own data (test set, public data), where sites bring theirs
    data_dir: Path | None = None

    def keys(self) -> dict[str, str]:
        """The sites' public keys by name."""
        if self.insecure:
            if self.certs is not None:
                raise UsageError("--insecure and --certs exclude each other: give one.")
            return {}
        if self.certs is None:
            raise UsageError("give the server's folder of keys with --certs (see `fedskew certs`), or say --insecure.")
        found = {path.stem: path.read_text() for path in sorted((self.certs / "sites").glob("*.pub"))}
        for name in ("server.crt", "server.key", "ca.crt"):
            if not (self.certs / name).exists():
                raise UsageError(
                    f"{self.certs} has no {name}; --certs needs the server's folder (see `fedskew certs`)."
                )
        if not found:
            raise UsageError(f"{self.certs / 'sites'} holds no site's public key (NAME.pub).")
        return found

    def config(self) -> Header:
        """What Flower's link is started with."""
        certs = self.certs or Path()
        return {
            "host": self.host,
            "port": self.port,
            "limit": self.limit,
            "secure": not self.insecure,
            "sites": self.keys(),
            "certificate": str(certs / "server.crt"),
            "key": str(certs / "server.key"),
        }
