"""A site's states on its own disk: what its clients keep between rounds survives a restart, and a server's.

    <folder>/<run>/<round>-<sha256>.safetensors

A file appears by a rename when it is whole, and its name holds its checksum. A round's state counts only
once the server says so, in the next message (`base`); what it does not count is removed then. States as far
back as the server may go (`keep`) stay.
"""

from __future__ import annotations

from pathlib import Path

from fedskew.core.files import sha256, write_atomically
from fedskew.federation.store import Blob, Damaged


class States:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, run: str, base: int) -> Blob:
        """The state after round `base`; empty for a client that never finished one."""
        if base < 0:
            return b""
        for path in self._versions(run).get(base, []):
            blob = path.read_bytes()
            if sha256(blob) == path.stem.partition("-")[2]:
                return blob
        raise Damaged(f"the state after round {base + 1} of run {run} is missing or damaged in {self.folder}")

    def put(self, run: str, round: int, blob: Blob) -> None:
        place = self.folder / run
        place.mkdir(parents=True, exist_ok=True)
        for old in self._versions(run).get(round, []):
            old.unlink()
        write_atomically(place / f"{round:06d}-{sha256(blob)}.safetensors", blob)

    def settle(self, run: str, base: int, keep: int) -> None:
        """Only rounds up to `base` count; of those up to `keep` the last."""
        versions = self._versions(run)
        needless = [round for round in versions if round > base]
        needless += sorted(round for round in versions if round <= min(keep, base))[:-1]
        for round in needless:
            for path in versions[round]:
                path.unlink()

    def _versions(self, run: str) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in (self.folder / run).glob("*-*.safetensors"):
            found.setdefault(int(path.name[:6]), []).append(path)
        return found
