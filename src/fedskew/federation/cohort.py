"""Which clients take part in a round, and after which rounds the model is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedskew.core.seeding import Purpose, seeded


def draw_cohort(population: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """This round's clients, in order: drawn without replacement by (seed, round) alone, the same for every method."""
    order = torch.randperm(len(population), generator=seeded(seed, Purpose.COHORT, 0, round))
    return sorted(population[int(i)] for i in order[:size])


def is_evaluated(round: int, rounds: int, every: int) -> bool:
    """Whether the model is evaluated after this round (counted from 0): every so many rounds, and after the last."""
    return (round + 1) % every == 0 or round == rounds - 1
