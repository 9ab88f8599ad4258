"""Which clients take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedskew.core.seeding import seeded

COHORT = 4  # what a generator is for: part of its seed (see world.py)


def draw_cohort(population: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """This round's clients: uniform without replacement, by (seed, round) alone, so every method sees the same."""
    order = torch.randperm(len(population), generator=seeded(seed, COHORT, 0, round))
    return sorted(population[int(i)] for i in order[:size])
