"""Which job starts next: results are needed in order, large jobs should start early, and memory is bounded."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fedskew.federation.simulate.jobs import Job

MAX_WAITING_BYTES = 256 << 20  # size of the updates that may wait for an earlier one
ATTEMPTS = 2  # a job whose worker died this many times is given up


class Window:
    """The jobs that may start now: the next `size` ones, from the first whose result has not been passed on.

    Within the window the largest job starts first. Jobs after it wait, so at most `size` results are held in memory.
    Jobs are identified by their index in `jobs`.
    """

    def __init__(self, jobs: Sequence[Job], size: int) -> None:
        self.jobs, self.size = jobs, size
        self.heap: list[tuple[int, int]] = []  # (-weight, index) of the jobs that may start, largest first
        self.entered = 0  # jobs that have been in the window
        self.advance(0)

    def advance(self, first: int) -> None:
        """Move the window so that it starts at job `first`: the results before it have been passed on."""
        end = min(len(self.jobs), first + self.size)
        for index in range(self.entered, end):
            heapq.heappush(self.heap, (-self.jobs[index].weight, index))
        self.entered = max(self.entered, end)

    def __bool__(self) -> bool:
        """Whether a job may start now."""
        return bool(self.heap)

    def take(self) -> int:
        """Remove and return the index of the largest job that may start."""
        return heapq.heappop(self.heap)[1]

    def give_back(self, index: int) -> None:
        """Put back a job that was taken and has to be performed again."""
        heapq.heappush(self.heap, (-self.jobs[index].weight, index))
