"""The noisy sums that a private run has released, in a file that outlives its checkpoints.

Where a checkpoint is damaged, a resumed run repeats rounds. With new noise, as between real sites, each repetition is
one more release about the same clients, which the number of rounds does not show. So every noisy sum is recorded, with
a digest of its bits, before it is used, and epsilon is computed from the record. A simulation takes its noise from the
seed: a repeated round has the same bits, nothing new is released, and it counts once.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path

import msgspec
from torch import Tensor

from fedskew.core.settings import UsageError
from fedskew.federation.accounting import Releases

FILE = "privacy.jsonl"  # in the run's directory


class Release(msgspec.Struct, frozen=True):
    """One noisy sum: a line of privacy.jsonl."""

    round: int
    noise: float  # relative to the clipping norm
    sum: str = ""  # digest of its bits; "" if the round was not recorded at the time


class Ledger:
    """The releases of a run, in the file `path`; None: in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.releases = _read(path) if path is not None and path.exists() else []

    def record(self, round: int, noise: float, total: Tensor) -> None:
        """Record a noisy sum, on disk when this returns. The same bits again are not recorded twice."""
        self._add(Release(round, noise, hashlib.sha256(total.cpu().numpy().tobytes()).hexdigest()[:32]))

    def fill(self, rounds: int, noise: float) -> None:
        """Record the first `rounds` rounds as far as they are missing: an earlier version kept no record."""
        known = {release.round for release in self.releases}
        for round in sorted(set(range(rounds)) - known):
            self._add(Release(round, noise))

    def _add(self, release: Release) -> None:
        if release in self.releases:
            return
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(release) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        self.releases.append(release)

    def counted(self) -> Releases:
        """What is released so far, for the accountant."""
        return tuple(sorted(Counter(release.noise for release in self.releases).items()))


def _read(path: Path) -> list[Release]:
    """The releases in a file; UsageError if it is damaged.

    A last line without its end is cut off: the run was stopped while it wrote the line, before it used the sum.
    """
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        os.truncate(path, len(whole + newline))
    try:
        return [msgspec.json.decode(line, type=Release) for line in whole.splitlines()]
    except ValueError:
        raise UsageError(
            f"{path} is damaged, so that the epsilon of this run is not known: restore it from a backup, or start a "
            "new run."
        ) from None
