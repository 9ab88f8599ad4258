"""A limit on the time that a piece of work may take in this process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LONGEST = 1e9  # seconds, 30 years; an infinite time is an error of setitimer


class TimeIsUp(BaseException):
    """The work took too long. Not an Exception, so that no `except Exception` inside the work keeps it."""


def memory_limit(megabytes: int) -> None:
    """Let this process have at most so much memory of its own; more raises MemoryError. 0: no limit. Linux only."""
    if megabytes and sys.platform == "linux":
        import resource

        most = megabytes << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the work inside after `seconds`; 0 is no limit.

    It works by a signal, so only in the main thread and not on Windows; elsewhere there is no limit.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable or seconds <= 0:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, LONGEST))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
