"""The partitioners that draw from a distribution do what their papers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.data.split.allotment import Pool, capped_table, fill_requests, redraw, renormalised, sizes_from_shares
from fedskew.data.split.chain import make_partition
from fedskew.data.split.dirichlet import GroupedEqual
from helpers.splits import CIFAR10, Labels, balanced, labels, quick, sizes, table


def test_shares_are_cut_at_the_floor_of_their_running_sum() -> None:
    """7 x (.5, .8) = 3.5, 5.6: cuts at 3 and 5."""
    assert sizes_from_shares(np.array([0.5, 0.3, 0.2]), 7).tolist() == [3, 2, 2]


def test_a_client_at_its_even_share_gets_no_further_class() -> None:
    """n 10, N 3, sizes (4, 1, 1): the first has more than 10/3, so (.5,.3,.2) -> (0,.6,.4), cuts (0, 4) -> 0, 4, 3."""
    rng = np.random.RandomState(0)
    p = renormalised(np.array([0.5, 0.3, 0.2]), np.array([4, 1, 1]) < 10 / 3, rng)
    assert sizes_from_shares(p, 7).tolist() == [0, 4, 3]
    both = [np.array([0.7, 0.15, 0.15]), np.array([0.5, 0.3, 0.2])]  # of 6 samples: cuts 4.2, 5.1
    assert capped_table(both, [6, 7], 10 / 3, rng).tolist() == [[4, 0], [1, 4], [1, 3]]


def test_shares_that_underflow_go_to_one_open_client() -> None:
    p = np.array([[np.nan] * 3, [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    is_open = np.array([[True, True, True], [True, False, True], [False, False, True]])
    shares = renormalised(p, is_open, np.random.RandomState(0))
    assert sorted(shares[0]) == [0, 0, 1]
    assert shares[1:].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_dirichlet_gives_the_known_split_of_seed_0() -> None:
    y = balanced(4, 25)
    partition = make_partition("dirichlet:alpha=0.5,clients=4", y, seed=0)
    assert sizes(partition) == [35, 22, 18, 25]
    assert table(partition, y).tolist() == [[5, 16, 14, 0], [7, 4, 0, 11], [1, 0, 3, 14], [12, 5, 8, 0]]
    assert partition.notes == ()


def published_dirichlet(y: Labels, N: int, alpha: float, least: int, seed: int) -> list[list[int]]:
    """The procedure of MOON and NIID-Bench, one list at a time."""
    rng = np.random.RandomState(seed)
    clients: list[list[int]] = [[]]
    while min(map(len, clients)) < least:
        clients = [[] for _ in range(N)]
        for c in range(y.max() + 1):
            samples = np.where(y == c)[0]
            rng.shuffle(samples)
            p = rng.dirichlet(np.repeat(alpha, N))
            p = np.array([share * (len(client) < len(y) / N) for share, client in zip(p, clients, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(samples)).astype(int)[:-1]
            clients = [a + b.tolist() for a, b in zip(clients, np.split(samples, cuts), strict=True)]
    for client in clients:
        rng.shuffle(client)
    return clients


def test_dirichlet_is_the_published_procedure_sample_for_sample() -> None:
    y = np.random.RandomState(1).permutation(balanced(5, 60))
    notes: list[str] = []
    for seed in range(8):
        partition = make_partition("dirichlet:alpha=0.2,clients=6,min=15", y, seed=seed)
        assert [samples.tolist() for samples in partition.clients] == published_dirichlet(y, 6, 0.2, 15, seed)
        notes += partition.notes
    assert notes, "no seed needed a redraw: the test is too easy"


def test_a_client_below_an_even_share_that_is_no_whole_number_gets_a_further_class() -> None:
    """35 samples over 4 clients are 8.75 each: a client with 8 is still open, as in the published code."""
    y = balanced(5, 7)
    for seed in range(40):
        partition = make_partition("dirichlet:alpha=0.5,clients=4,min=1", y, seed=seed)
        assert [samples.tolist() for samples in partition.clients] == published_dirichlet(y, 4, 0.5, 1, seed)


@pytest.mark.parametrize(
    ("alpha", "cap", "smallest", "largest"),
    [
        (0.1, "true", 1732, 7953),
        (0.1, "false", 953, 11443),
        (0.5, "true", 2919, 6813),
        (0.5, "false", 2591, 8198),
        (5, "true", 4123, 5785),
        (5, "false", 3964, 6353),
    ],
)
def test_the_cap_narrows_the_sizes_as_measured(alpha: float, cap: str, smallest: int, largest: int) -> None:
    """Mean over seeds 0 to 19 of the smallest and the largest of ten clients, 10 x 5000 samples."""
    found = np.array(
        [sizes(make_partition(f"dirichlet:alpha={alpha},cap={cap}", CIFAR10, seed=seed)) for seed in range(20)]
    )
    assert abs(found.min(axis=1).mean() - smallest) <= 1
    assert abs(found.max(axis=1).mean() - largest) <= 1


@quick
@given(y=labels(), N=st.integers(2, 4), least=st.integers(1, 2), seed=st.integers(0, 99))
def test_dirichlet_keeps_its_minimum_and_exceeds_the_cap_by_one_class_only(
    y: Labels, N: int, least: int, seed: int
) -> None:
    partition = make_partition(f"dirichlet:clients={N},min={least},alpha=0.5", y, seed=seed)
    counts = np.unique(y, return_counts=True)[1]
    assert min(sizes(partition)) >= least
    # the last client also takes what truncation leaves, one sample per class at most
    assert max(sizes(partition)) < len(y) / N + counts.max() + len(counts)


def test_dirichlet_is_even_for_a_large_alpha_and_one_client_per_class_for_a_small_one() -> None:
    y = balanced(10, 1000)
    even = table(make_partition("dirichlet:alpha=1e6,clients=5,cap=false", y, seed=0), y)
    assert np.abs(even - 200).max() <= 4
    single = table(make_partition("dirichlet:alpha=1e-3,clients=3,cap=false,min=1", y, seed=0), y)
    assert (single.max(axis=0) > 990).sum() >= 8


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 1e-5])
def test_dirichlet_assigns_everything_even_if_all_shares_underflow(alpha: float) -> None:
    y = balanced(10, 50)
    for cap in ("true", "false"):
        partition = make_partition(f"dirichlet:alpha={alpha},clients=3,cap={cap},min=1", y, seed=0)
        assert sorted(np.concatenate(partition.clients)) == list(range(500))
        assert (np.count_nonzero(table(partition, y), axis=0) == 1).all(), "a class on two clients"


def test_a_minimum_that_cannot_be_reached_says_the_largest_that_can() -> None:
    y = balanced(6, 10)
    for partitioner in ("dirichlet", "quantity"):
        with pytest.raises(UsageError, match=r"min=50 is invalid: 60 samples over 10 clients allow at most 6"):
            make_partition(f"{partitioner}:min=50", y, seed=0)
        with pytest.raises(UsageError, match=r"min=6 was not reached in 1000 draws, the largest minimum .* was [0-5];"):
            make_partition(f"{partitioner}:min=6,alpha=0.5", y, seed=0)


def test_redraw_counts_what_it_rejects_and_reports_the_best_if_all_fail() -> None:
    """Draws 1, 4, 2: with 4 wanted the first is rejected; with 5 wanted all three are, and the best is 4."""
    assert redraw(iter([1, 4, 2]).__next__, int, 4, 3, "") == (4, 1)
    with pytest.raises(UsageError, match="3 draws, best 4"):
        redraw(iter([1, 4, 2]).__next__, int, 5, 3, "{tries} draws, best {best}")


def test_grouped_equal_sizes_are_equal_and_skew_is_left() -> None:
    """CIFAR-10-LT with factor 100 has 12,406 samples: 620 or 621 each over 20 clients."""
    partition = make_partition("longtail:factor=100+grouped-equal:alpha=0.1,clients=20", CIFAR10, seed=7)
    assert sorted(set(sizes(partition))) == [620, 621]
    assert partition.notes[0].startswith("draws of the split rejected because a client had too few samples: ")
    assert np.count_nonzero(table(partition, CIFAR10), axis=1).mean() < 6


@quick
@given(N=st.integers(10, 34), seed=st.integers(0, 99))
def test_grouped_equal_keeps_a_group_s_samples_near_its_ten_clients(N: int, seed: int) -> None:
    """The first draw is the order of all samples; group g is its g-th stretch of 10 n / N."""
    y = balanced(4, 100)
    partition = make_partition(f"grouped-equal:clients={N},alpha=20", y, seed=seed)
    client = np.empty(400, int)
    for i, samples in enumerate(partition.clients):
        client[samples] = i
    order, size, groups = np.random.RandomState(seed).permutation(400), 4000 // N, -(-N // 10)
    for g in range(groups):
        members = client[order[g * size : (g + 1) * size if g < groups - 1 else 400]]
        assert 10 * g - 1 <= members.min() <= members.max() <= 10 * g + 10


def test_grouped_equal_gives_a_group_of_ten_clients_its_share_of_the_samples() -> None:
    """29 samples over 20 clients: the first ten share 290 / 20 = 14 of them, not ten times 29 // 20."""
    clients = GroupedEqual(clients=20, alpha=20.0)(Pool(np.arange(29) % 2), np.random.RandomState(0)).clients
    order = np.random.RandomState(0).permutation(29)
    assert set(np.concatenate(clients)[:14].tolist()) == set(order[:14].tolist())


def test_grouped_equal_takes_the_first_draw_that_gives_every_worker_half_the_mean() -> None:
    """Three classes of 100 over ten workers: the mean is 30, so the first of a batch with 15 or more for each."""
    rng = np.random.RandomState(0)
    shares = rng.dirichlet(np.full(10, 2.0), size=(250, 3))
    tables = capped_table(np.moveaxis(shares, 1, 0), [100] * 3, 30.0, rng)
    smallest = tables.sum(axis=-1).min(axis=-1)
    first = next(i for i in range(250) if smallest[i] >= 15)
    assert smallest[first] < smallest.max()
    found, rejected = GroupedEqual(alpha=2.0)._table([100] * 3, 10, np.random.RandomState(0))
    assert (found.tolist(), rejected) == (tables[first].tolist(), first)


def test_grouped_equal_workers_have_half_the_mean_before_the_second_cut() -> None:
    """Three classes of 100 over ten workers: 15 or more each."""
    found, thrown = GroupedEqual(alpha=0.5)._table([100, 100, 100], 10, np.random.RandomState(0))
    assert found.sum(axis=0).tolist() == [100, 100, 100]
    assert found.sum(axis=1).min() >= 15
    assert thrown > 0
    for seed in range(10):  # no worker but the last, who takes the remainders, exceeds the mean by more than a class
        found, _ = GroupedEqual(alpha=0.5)._table([10] * 30, 10, np.random.RandomState(seed))
        assert found.sum(axis=1)[:-1].max() < 30 + 10
    with pytest.raises(UsageError, match="grouped-equal: no draw"):
        make_partition("grouped-equal:alpha=1e-6,clients=10", balanced(2, 100), seed=0)


def test_dirichlet_mix_fills_every_quota_exactly() -> None:
    for alpha in (1e-9, 0.1, 1e6):
        partition = make_partition(f"dirichlet-mix:alpha={alpha},clients=7", balanced(3, 100), seed=0)
        assert sizes(partition) == [43] * 6 + [42]


def test_dirichlet_mix_follows_the_prior_for_a_large_alpha() -> None:
    """Classes of 800 and 200 over 5 clients: 160 and 40 each, within 5 sigma (28)."""
    y = np.repeat([0, 1], [800, 200])
    mix = table(make_partition("dirichlet-mix:alpha=1e6,prior=true,clients=5", y, seed=0), y)
    assert np.abs(mix - [160, 40]).max() < 28


def test_dirichlet_mix_with_prior_is_more_skewed_by_the_factor_of_classes() -> None:
    """alpha 1 times the prior of ten even classes is Dir(.1)."""
    y = balanced(10, 500)
    held = {
        text: np.count_nonzero(table(make_partition(f"dirichlet-mix:{text},clients=50", y, seed=0), y), axis=1)
        for text in ("alpha=1,prior=true", "alpha=0.1", "alpha=1")
    }
    assert abs(held["alpha=1,prior=true"].mean() - held["alpha=0.1"].mean()) < 1
    assert held["alpha=1"].mean() > held["alpha=0.1"].mean() + 2


def test_dirichlet_mix_gives_early_and_late_clients_as_much_of_a_small_class() -> None:
    """A class of a tenth: both halves of the clients get about as much of it."""
    y = np.repeat([0, 1, 2], [4500, 4500, 1000])
    mix = table(make_partition("dirichlet-mix:alpha=1,clients=200", y, seed=0), y)
    assert abs(mix[:100, 2].sum() - mix[100:, 2].sum()) < 200


def test_requests_beyond_the_stock_are_filled_in_part_at_random() -> None:
    rng = np.random.RandomState(0)
    assert fill_requests(np.array([2, 0, 3]), 5, rng).tolist() == [2, 0, 3]
    got = np.mean([fill_requests(np.array([20, 0, 60]), 40, rng) for _ in range(50)], axis=0)
    assert got.sum() == 40
    assert np.abs(got - [10, 0, 30]).max() < 2


@pytest.mark.parametrize("text", ["quantity:alpha=0.5,clients=5,min=300", "lognormal:sigma=1,clients=5"])
def test_quantity_skew_changes_the_sizes_and_not_the_mix(text: str) -> None:
    y = balanced(4, 2500)
    partition = make_partition(text, y, seed=0)
    assert min(sizes(partition)) >= 300
    assert max(sizes(partition)) > 3 * min(sizes(partition))
    mix = table(partition, y) / np.array(sizes(partition))[:, None]
    assert np.abs(mix - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 300)


def test_lognormal_sizes_have_the_spread_asked_for() -> None:
    found = np.array(sizes(make_partition("lognormal:sigma=0.3,clients=500", np.arange(500_000) % 2, seed=0)))
    assert found.sum() == 500_000
    assert abs(np.log(found).std() - 0.3) < 0.03
    assert sorted(set(sizes(make_partition("lognormal:sigma=0,clients=7", np.arange(100), seed=0)))) == [14, 15]
