"""Which job goes next: results are wanted in order, the largest job should start first, and memory is bounded."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fedskew.federation.simulate.jobs import Job

HELD = 256 << 20  # bytes of updates that may wait for their turn
TRIES = 2  # a job that killed its worker so often is given up


class Window:
    """Jobs that may start now: the next `size` ones from the first whose result has not been passed on.

    Within the window the largest job goes first. Nothing beyond it starts, so at most `size` results wait.
    """

    def __init__(self, jobs: Sequence[Job], size: int) -> None:
        self.jobs, self.size = jobs, size
        self.heap: list[tuple[int, int]] = []  # (-weight, place) of the jobs that may start, largest first
        self.entered = 0  # jobs that have been in the window
        self.open_until(0)

    def open_until(self, passed_on: int) -> None:
        """Results before `passed_on` have been passed on: the window moves there."""
        end = min(len(self.jobs), passed_on + self.size)
        for place in range(self.entered, end):
            heapq.heappush(self.heap, (-self.jobs[place].weight, place))
        self.entered = max(self.entered, end)

    def __bool__(self) -> bool:
        """Whether a job may start now."""
        return bool(self.heap)

    def take(self) -> int:
        """The place of the largest job that may start."""
        return heapq.heappop(self.heap)[1]

    def give_back(self, place: int) -> None:
        """A job that was taken has to be done again."""
        heapq.heappush(self.heap, (-self.jobs[place].weight, place))
