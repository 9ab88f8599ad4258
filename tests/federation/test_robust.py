"""Robust rules on numbers small enough to work by hand, and what an attacker can do to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Tensors
from fedskew.federation.robust import (
    RULES,
    Robust,
    buckets,
    flat,
    geometric,
    krum,
    left_out,
    median,
    nearest_means,
    robust_updates,
    trimmed,
)

FIVE = tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [1000.0, -1000.0]])


def updates(values: list[list[float]]) -> list[Update]:
    return [Update({"parameters": Tensors(w=tensor(v))}, weight=float(i + 1)) for i, v in enumerate(values)]


def test_the_trimmed_mean_leaves_out_the_extremes_of_each_entry() -> None:
    """First entry: of 1, 2, 3, 4, 1000 the middle three, 3. Second: of -1000, 10, 20, 30, 40: 20."""
    center, shares = trimmed(FIVE, 1)
    assert_close(center, tensor([3.0, 20.0], dtype=torch.float64))
    assert_close(shares, tensor([1 / 6, 2 / 6, 2 / 6, 1 / 6, 0.0], dtype=torch.float64))


def test_the_median_is_the_middle_or_the_mean_of_the_middle_two() -> None:
    assert_close(median(FIVE, 1)[0], tensor([3.0, 20.0], dtype=torch.float64))
    assert_close(median(FIVE[:4], 1)[0], tensor([2.5, 25.0], dtype=torch.float64))


def test_the_geometric_median_of_three_points_on_a_line_is_the_middle_one() -> None:
    assert geometric(tensor([[0.0], [1.0], [100.0]]), 1)[0].item() == pytest.approx(1.0, abs=1e-4)


def test_krum_keeps_the_updates_that_lie_close_together() -> None:
    """K = 5, f = 1: sums over 2 neighbours; the outlier's is the largest."""
    center, shares = krum(FIVE, 1)
    assert_close(center, FIVE[:4].double().mean(0))
    assert shares[4] == 0


def test_nearest_neighbour_mixing_replaces_an_update_by_the_mean_of_its_neighbours() -> None:
    """Of 0, 1, 10 with f = 1: 0 and 1 become .5, 10 becomes 5.5."""
    use = nearest_means(tensor([[0.0], [1.0], [10.0]]), 1)
    assert_close(use @ tensor([[0.0], [1.0], [10.0]]).double(), tensor([[0.5], [0.5], [5.5]], dtype=torch.float64))


def test_buckets_use_every_update_once() -> None:
    use = buckets(5, torch.Generator().manual_seed(0))
    assert use.shape == (3, 5)
    assert ((use > 0).sum(0) == 1).all()
    assert_close(use.sum(1), torch.ones(3, dtype=torch.float64))


def test_every_client_gets_the_robust_mean_with_an_equal_weight() -> None:
    made, shares = robust_updates(updates([[1.0], [2.0], [3.0], [4.0], [1e30]]), Robust("median"), torch.Generator())
    assert [u.payload["parameters"]["w"].item() for u in made] == [3.0] * 5
    assert len({u.weight for u in made}) == 1
    assert shares == pytest.approx([0, 0, 1, 0, 0])


def test_what_is_used_of_each_client_is_counted_through_the_mixing() -> None:
    """0, 1 and 10 become .5, .5 and 5.5: the median is the second, which is half of the first two clients."""
    made, shares = robust_updates(updates([[0.0], [1.0], [10.0]]), Robust("median", "nnm"), torch.Generator())
    assert made[0].payload["parameters"]["w"].item() == 0.5
    assert shares == pytest.approx([0.5, 0.5, 0.0])


def test_no_more_than_half_of_the_buckets_count_as_hostile() -> None:
    """Five clients, two of them hostile: of three buckets only one can be trimmed at each end."""
    made, shares = robust_updates(
        updates([[1.0], [2.0], [3.0], [4.0], [5.0]]), Robust("trimmed", "bucketing", attackers=2), torch.Generator()
    )
    assert 1.0 <= made[0].payload["parameters"]["w"].item() <= 5.0
    assert sum(shares) == pytest.approx(1.0)


def test_a_client_that_is_used_by_half_is_not_left_out() -> None:
    """Of four clients alike each would be a quarter: an eighth is half of that, less than an eighth is less."""
    assert left_out({0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}) == set()
    assert left_out({0: 0.5, 1: 0.25, 2: 0.15, 3: 0.1}) == {3}


def test_integer_tensors_are_the_largest() -> None:
    several = [Update({"buffers": Tensors(n=tensor(n), m=tensor(float(n)))}, 1.0) for n in (3, 9, 4)]
    made, _ = robust_updates(several, Robust("median"), torch.Generator())
    assert made[0].payload["buffers"]["n"] == 9
    assert made[0].payload["buffers"]["m"] == 4.0


def test_too_many_attackers_are_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="at most 1 attackers can be withstood"):
        Robust("median", attackers=2).check(4)
    Robust("mean", attackers=9).check(2)


values = st.floats(-10, 10, width=32)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(values, min_size=2, max_size=2), min_size=4, max_size=6),
    st.sampled_from(["trimmed", "median", "geometric", "krum"]),
    st.sampled_from(["none", "nnm"]),
    st.sampled_from([1e3, -1e6, 1e30]),
)
def test_one_attacker_cannot_move_the_result_far(honest: list[list[float]], rule, mixing, size: float) -> None:  # type: ignore[no-untyped-def]
    """Whatever it sends, the result stays near the honest updates; the mean would follow it anywhere."""
    made, _ = robust_updates(updates([*honest, [size, -size]]), Robust(rule, mixing), torch.Generator())
    assert flat(made[0].payload).abs().max() <= 60


@pytest.mark.parametrize("rule", list(RULES))
def test_updates_that_agree_are_left_as_they_are(rule) -> None:  # type: ignore[no-untyped-def]
    made, _ = robust_updates(updates([[0.5, -2.0]] * 5), Robust(rule, "nnm"), torch.Generator())
    assert_close(flat(made[0].payload), tensor([0.5, -2.0]))
