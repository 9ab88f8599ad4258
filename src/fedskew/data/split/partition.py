"""Which client has which samples: a partition of the training pool, each client's own parts, newcomers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import IntArray


@dataclass(frozen=True)
class Partition:
    """Which samples of the training pool each client has, as indices into the pool.

    clients: one array of indices per client, in random order.
    public: the server's public set D0, balanced and on no client; often empty.
    noise: standard deviation of each client's input noise; None: no noise.
    rotation: each client's turn of its inputs, in degrees; None: no rotation.
    colour: each client's colour cast, from -1 to 1; None: no cast.
    resolution: by how much each client's images are coarser; None: not at all.
    concept: how far each client's labels are shifted, modulo the number of classes; None: not at all.
    notes: what the user should know, such as how many samples are left over.
    """

    clients: tuple[IntArray, ...]
    public: IntArray
    noise: tuple[float, ...] | None = None
    rotation: tuple[float, ...] | None = None
    colour: tuple[float, ...] | None = None
    resolution: tuple[int, ...] | None = None
    concept: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def features_differ(self) -> bool:
        """Whether the same sample would look or be called different at another client."""
        skews = (self.noise, self.rotation, self.colour, self.resolution, self.concept)
        return any(skew is not None for skew in skews)


@dataclass(frozen=True)
class Parts:
    """One client's samples for training, validation and testing, as indices into the training pool."""

    train: IntArray
    validation: IntArray
    test: IntArray


def portion(partition: Partition, *, validation: float = 0.0, test: float = 0.0, seed: int) -> tuple[Parts, ...]:
    """Split each client's samples at random into its own training, validation and test parts.

    validation, test: fractions of each client's samples; 0 leaves the part empty. A client always keeps one sample
    to train on. The parts of client i depend on its samples and (seed, i) alone.
    """
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise UsageError(
            f"validation={validation:g} with test={test:g} is invalid: expected fractions that sum to less than 1."
        )
    parts = []
    for i, samples in enumerate(partition.clients):
        n = len(samples)
        tests = n - round((1 - test) * n)
        trains = max(min(n, 1), n - tests - (n - round((1 - validation) * n)))
        tests = min(tests, n - trains)
        order = np.random.default_rng((checked_seed(seed), i)).permutation(samples)
        parts.append(Parts(*np.split(order, [trains, n - tests])))
    return tuple(parts)


def draw_newcomers(population: int, share: float, seed: int) -> tuple[int, ...]:
    """Clients that never train, sorted. `share`: how many of the population, or a fraction below 1; 0 is none."""
    if share == 0:
        return ()
    count = count_or_fraction(share, population, "newcomers")
    chosen = np.random.default_rng(checked_seed(seed)).permutation(population)[:count]
    return tuple(sorted(chosen.tolist()))


def count_or_fraction(value: float, of: int, setting: str) -> int:
    """The number that `value` stands for: itself, or below 1 that fraction of `of`, rounded down. Never 0, never all.

    setting: how the error message names the value, such as "sample: keep".
    """
    count = int(round(value * of, 6)) if value < 1 else value  # 0.29 * 100 is 28.999999999999996
    if not 0 < count < of or count != int(count):
        raise UsageError(
            f"{setting}={value:g} is invalid: expected a count from 1 to {of - 1}, "
            f"or a fraction below 1 that gives at least 1 of {of}."
        )
    return int(count)


def checked_seed(seed: int) -> int:
    """The seed, if numpy can use it."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} is invalid: expected a number from 0 to {2**32 - 1}.")
    return seed
