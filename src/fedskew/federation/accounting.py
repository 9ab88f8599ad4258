"""How much privacy noise on sums of updates gives: epsilon at a delta, by Google's dp-accounting (the extra `dp`).

Rounds are composed with Renyi differential privacy. If every client is in every round, one client's update may be
present or not, so a sum changes by C at most. If `cohort` of `population` clients are drawn without replacement for
each round, one client may be exchanged for another: a sum changes by 2 C, and drawing lowers epsilon. The draw must not
be known to the observer.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from fedskew.core.settings import UsageError

LARGEST = 1000.0  # noise above which no budget is looked for
Releases = tuple[tuple[float, int], ...]  # (noise relative to the clipping norm, how many sums with it)


def library() -> Any:
    """The module dp_accounting; UsageError if it is not installed."""
    try:
        import_module("dp_accounting.rdp")
        return import_module("dp_accounting")
    except ImportError:
        raise UsageError("differential privacy needs dp-accounting: pip install 'fedskew[dp]'.") from None


def event(noise: float, rounds: int, cohort: int, population: int) -> Any:
    """What an observer sees of `rounds` rounds, for the accountant."""
    dp = library()
    if cohort < population:
        one = dp.SampledWithoutReplacementDpEvent(population, cohort, dp.GaussianDpEvent(noise / 2))
    else:
        one = dp.GaussianDpEvent(noise)
    return dp.SelfComposedDpEvent(one, rounds)


def accountant(cohort: int, population: int) -> Any:
    """A new accountant for this way of drawing clients."""
    dp = library()
    kind = dp.NeighboringRelation
    return dp.rdp.RdpAccountant(
        neighboring_relation=kind.REPLACE_ONE if cohort < population else kind.ADD_OR_REMOVE_ONE
    )


def spent(noise: float, rounds: int, cohort: int, population: int, delta: float) -> float:
    """epsilon after `rounds` rounds with this noise (relative to the clipping norm)."""
    return spent_on(((noise, rounds),), cohort, population, delta)


@lru_cache(maxsize=10_000)
def spent_on(releases: Releases, cohort: int, population: int, delta: float) -> float:
    """epsilon of noisy sums, whose noise may differ."""
    book = accountant(cohort, population)
    for noise, rounds in releases:
        book.compose(event(noise, rounds, cohort, population))
    return float(book.get_epsilon(delta)) if releases else 0.0


def noise_for(epsilon: float, rounds: int, cohort: int, population: int, delta: float, before: Releases = ()) -> float:
    """The smallest noise with which `rounds` rounds, after the releases `before`, spend at most `epsilon`."""
    if spent_on((*before, (LARGEST, rounds)), cohort, population, delta) > epsilon:
        done = f" after {sum(count for _, count in before)} noisy sums that were released" if before else ""
        raise UsageError(
            f"privacy.epsilon={epsilon:g} cannot be reached in {rounds} rounds{done}: give more, or fewer rounds."
        )
    low, high = 0.0, LARGEST
    while high - low > 1e-4 * high:
        middle = (low + high) / 2 if low else high / 2
        enough = spent_on((*before, (middle, rounds)), cohort, population, delta) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
        if high < 1e-3:
            break
    return high
