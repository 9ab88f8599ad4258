"""Which clients take part in a round, and after which rounds the model is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedskew.core.seeding import Purpose, seeded


def draw_cohort(population: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """The `size` clients of `population` that take part in a round, in ascending order.

    Drawn without replacement. The draw depends on (seed, round) only, so it is the same for every method.
    """
    order = torch.randperm(len(population), generator=seeded(seed, Purpose.COHORT, 0, round))
    return sorted(population[int(i)] for i in order[:size])


def is_evaluated(round: int, rounds: int, every: int) -> bool:
    """Whether the model is evaluated after a round (counted from 0): after every `every` rounds, and after the last."""
    return (round + 1) % every == 0 or round == rounds - 1
