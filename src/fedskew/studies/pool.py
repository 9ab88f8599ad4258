"""A pool of processes that carry out the runs of a study, and end with the process that started them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from fedskew.federation.simulate.processes import without_interrupts

Map = Callable[..., Iterator[Any]]  # as `Executor.map`


@contextmanager
def process_pool(count: int) -> Iterator[Map]:
    """The function `map` of a pool of `count` processes.

    The processes end if an exception leaves the block, Ctrl-C included, and if this process is killed: a run that
    they were carrying out stops there, and its directory is free. They ignore Ctrl-C themselves.
    """
    context = get_context("spawn")
    theirs, mine = context.Pipe(duplex=False)  # nothing is sent: it is closed in time, or by the death of this process

    with theirs, mine, ProcessPoolExecutor(count, context, initializer=_end_when_closed, initargs=(theirs,)) as pool:

        def start(*arguments: Any) -> Iterator[Any]:
            with without_interrupts():  # processes are started here
                return pool.map(*arguments)

        try:
            yield start
        except BaseException:
            mine.close()  # else leaving the pool waits for the runs that were started
            raise


def _end_when_closed(pipe: Connection) -> None:
    """In a worker: end this process, in whatever it is doing, when the other end of the pipe is closed."""
    threading.Thread(target=_wait_and_end, args=(pipe,), daemon=True).start()


def _wait_and_end(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    finally:
        os._exit(1)
