"""The states of a site's clients on its disk. They survive a restart of the site and of the server.

    <folder>/<run>/<round>-<sha256>.safetensors

A file is written under a temporary name and renamed when it is complete; its name contains its checksum. The state
of a round counts once the next request says so (`base`); otherwise it is removed. Older states are kept as long as
the server may be resumed from an earlier round (`keep`).
"""

from __future__ import annotations

from pathlib import Path

from fedskew.core.files import sha256, write_atomically
from fedskew.federation.store import Blob, Damaged


class States:
    """The client states in a folder, by run and round.

    With `fresh` a state that is missing or damaged counts as none: the client goes on like one that never trained.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self.folder, self.fresh = folder, fresh

    def get(self, run: str, base: int) -> Blob:
        """The state after round `base`; b"" for -1, a client without state. Raises Damaged if it is."""
        if base < 0:
            return b""
        for path in self._versions(run).get(base, []):
            blob = path.read_bytes()
            if sha256(blob) == path.stem.partition("-")[2]:
                return blob
        if self.fresh:
            return b""
        raise Damaged(
            f"its state after round {base + 1} of run {run} is missing or damaged; its operator can restore it, or "
            "start without it: `fedskew join --fresh-state`"
        )

    def put(self, run: str, round: int, blob: Blob) -> None:
        """Write the state after a round, in place of one that is there already."""
        folder = self.folder / run
        folder.mkdir(parents=True, exist_ok=True)
        for old in self._versions(run).get(round, []):
            old.unlink()
        write_atomically(folder / f"{round:06d}-{sha256(blob)}.safetensors", blob)

    def settle(self, run: str, base: int, keep: int) -> None:
        """Remove the states after round `base`, which do not count, and those that round `keep` does not need."""
        versions = self._versions(run)
        obsolete = [round for round in versions if round > base]
        obsolete += sorted(round for round in versions if round <= min(keep, base))[:-1]
        for round in obsolete:
            for path in versions[round]:
                path.unlink()

    def _versions(self, run: str) -> dict[int, list[Path]]:
        """Round -> files."""
        versions: dict[int, list[Path]] = {}
        for path in (self.folder / run).glob("*-*.safetensors"):
            versions.setdefault(int(path.name[:6]), []).append(path)
        return versions

    def runs(self) -> dict[str, dict[str, float]]:
        """Run -> the bytes of its states, and when the last of them was written (seconds since 1970)."""
        found: dict[str, dict[str, float]] = {}
        for path in sorted(self.folder.glob("*/*-*.safetensors")):
            entry = found.setdefault(path.parent.name, {"bytes": 0, "written": 0.0})
            entry["bytes"] += path.stat().st_size
            entry["written"] = max(entry["written"], path.stat().st_mtime)
        return found

    def remove(self, run: str) -> None:
        """Delete the states of a run. The site cannot take part in it any more, unless it starts fresh."""
        for path in (self.folder / run).glob("*-*.safetensors"):
            path.unlink()
        (self.folder / run).rmdir()
