"""Watches where code takes its random numbers from, and what it does to torch's settings; for the laws of methods."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


class Watch:
    """What was seen: seeds that generators were given, and which global generators were drawn from or seeded."""

    def __init__(self) -> None:
        self.seeds: set[int] = set()
        self.touched: list[str] = []

    def noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, which creates or seeds a generator, and a note of the seed that it was given."""

        def noted(*args: Any, **options: Any) -> Any:
            self.seeds |= {value for value in (*args, *options.values()) if type(value) is int}
            return make(*args, **options)

        return noted

    def generator(self) -> type[torch.Generator]:
        """torch.Generator, with a note of every seed."""
        watch = self

        class Noted(torch.Generator):
            def manual_seed(self, seed: int) -> torch.Generator:
                watch.seeds.add(int(seed))
                return super().manual_seed(seed)

        return Noted


def global_states() -> dict[str, bytes]:
    """The states of the generators that a process has without asking."""
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy.random": pickle.dumps(np.random.get_state()),  # noqa: NPY002  the old one is what is watched
        "random": str(random.getstate()).encode(),
    }


@contextmanager
def watched() -> Iterator[Watch]:
    """While it lasts, notes what is done to generators; torch's global one is put back afterwards."""
    watch = Watch()
    with (
        torch.random.fork_rng(devices=[]),
        patch("torch.Generator", watch.generator()),
        patch("numpy.random.default_rng", watch.noting(np.random.default_rng)),
    ):
        torch.default_generator.manual_seed(271828)  # a state that no user's seed leaves behind
        before = global_states()
        yield watch
        now = global_states()
    watch.touched = [name for name, state in before.items() if now[name] != state]


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # words -> how to read and write it
    "torch's default type": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
}


@contextmanager
def torch_settings() -> Iterator[list[str]]:
    """While it lasts, watches settings of the whole process; afterwards the list names those that were changed.

    They are put back.
    """
    before, changed = {words: read() for words, (read, _) in SETTINGS.items()}, list[str]()
    try:
        yield changed
    finally:
        for words, (read, write) in SETTINGS.items():
            if read() != before[words]:
                changed.append(words)
                write(before[words])
