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


@lru_cache(maxsize=10_000)
def spent(noise: float, rounds: int, cohort: int, population: int, delta: float) -> float:
    """epsilon after `rounds` rounds with this noise (relative to the clipping norm)."""
    book = accountant(cohort, population)
    book.compose(event(noise, rounds, cohort, population))
    return float(book.get_epsilon(delta))


def noise_for(epsilon: float, rounds: int, cohort: int, population: int, delta: float) -> float:
    """The smallest noise with which `rounds` rounds spend at most `epsilon`."""
    if spent(LARGEST, rounds, cohort, population, delta) > epsilon:
        raise UsageError(
            f"privacy.epsilon={epsilon:g} cannot be reached in {rounds} rounds: give more, or fewer rounds."
        )
    low, high = 0.0, LARGEST
    while high - low > 1e-4 * high:
        middle = (low + high) / 2 if low else high / 2
        low, high = (low, middle) if spent(middle, rounds, cohort, population, delta) <= epsilon else (middle, high)
        if high < 1e-3:
            break
    return high
