"""Where randomness comes from: one enum of purposes, and generators that depend on a key alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A thread more or less changes sums: every site works with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on the numbers of its key alone."""
    words = np.random.SeedSequence([k % (1 << 32) for k in key]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
