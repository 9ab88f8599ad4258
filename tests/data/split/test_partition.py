"""Each client's own parts, and clients that never train."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.data.split.partition import Partition, draw_newcomers, portion
from helpers.splits import quick


@settings(quick, max_examples=100)
@given(
    n=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    validation=st.sampled_from([0.0, 0.05, 0.3]),
    test=st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.6]),
    seed=st.integers(0, 99),
)
def test_a_client_s_parts_are_its_samples_in_the_sizes_asked_for(
    n: list[int], validation: float, test: float, seed: int
) -> None:
    clients = tuple(np.split(np.arange(sum(n)) * 3, np.cumsum(n)[:-1]))
    parts = portion(Partition(clients, np.empty(0, np.int64)), validation=validation, test=test, seed=seed)
    for samples, part in zip(clients, parts, strict=True):
        assert sorted([*part.train, *part.validation, *part.test]) == samples.tolist()
        assert len(part.train) >= 1
        wanted = [len(samples) - round((1 - share) * len(samples)) for share in (validation, test)]
        if sum(wanted) < len(samples):
            assert [len(part.validation), len(part.test)] == wanted


def test_a_client_s_parts_are_random_and_independent_of_other_clients() -> None:
    """80/20 of 10: 8 and 2. What client 0 gets does not depend on the others."""
    one, two = np.arange(10), np.arange(10, 60)
    nothing = np.empty(0, np.int64)
    both = portion(Partition((one, two), nothing), test=0.2, seed=4)
    (alone,) = portion(Partition((one,), nothing), test=0.2, seed=4)
    assert [len(both[0].train), len(both[0].validation), len(both[0].test)] == [8, 0, 2]
    assert both[0].test.tolist() == alone.test.tolist()
    assert one.tolist() == list(range(10))
    tests = {tuple(portion(Partition((one,), nothing), test=0.2, seed=seed)[0].test) for seed in range(20)}
    assert len(tests) > 10
    with pytest.raises(UsageError, match="sum to less than 1"):
        portion(Partition((one,), nothing), validation=0.5, test=0.5, seed=0)


def test_each_client_s_test_part_is_drawn_independently_of_the_others() -> None:
    """Twenty clients of ten samples, two for testing: 45 pairs are possible, so all alike is no accident."""
    clients = tuple(np.split(np.arange(200), 20))
    parts = portion(Partition(clients, np.empty(0, np.int64)), test=0.2, seed=0)
    positions = {tuple(sorted(part.test - samples[0])) for samples, part in zip(clients, parts, strict=True)}
    assert len(positions) > 10


def test_newcomers_are_sorted_and_never_all_clients() -> None:
    held = draw_newcomers(100, 0.4, seed=0)
    assert len(set(held)) == 40
    assert list(held) == sorted(held)
    assert 0 <= held[0] <= held[-1] < 100
    assert held == draw_newcomers(100, 40, seed=0) != draw_newcomers(100, 40, seed=1)
    assert draw_newcomers(5, 0, seed=0) == ()
    with pytest.raises(UsageError, match="newcomers=5 is invalid: expected a count from 1 to 4"):
        draw_newcomers(5, 5, seed=0)
