"""Where randomness comes from: one list of purposes, and generators that depend on a key alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a generator is for. It is part of the generator's seed, so no two purposes share random numbers.

    The numbers decide results: never change or reuse one, only append.
    """

    TRAIN = 1  # a client's round: shuffling, augmentation, dropout
    EVALUATE = 2  # a client's evaluation, where a personal model may be trained first
    NOISE = 3  # the feature skew of one client
    COHORT = 4  # which clients take part in a round
    FAULT = 5  # which simulated clients fail in a round
    DIAGNOSE = 6  # which samples and clients the closing diagnostics look at
    NET = 7  # what a method adds to the initial net
    PRIVACY = 8  # noise of differential privacy in a simulation


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on the numbers of its key alone: (seed, purpose, client + 1, round), say."""
    words = np.random.SeedSequence([k % (1 << 32) for k in key]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread. The number of threads changes the order of sums and so the last bits of results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
