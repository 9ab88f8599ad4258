"""Lets coroutines wait for something that happens in another thread."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """Wakes all coroutines that wait; may be rung from any thread."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.event: asyncio.Event | None = None

    def ring(self) -> None:
        """Wake everyone who waits."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self.event is not None:
            self.event.set()
            self.event = None

    async def wait(self, seconds: float) -> None:
        """Wait for the next ring, at most `seconds`."""
        self.loop = asyncio.get_running_loop()
        self.event = self.event or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.event.wait(), seconds)
