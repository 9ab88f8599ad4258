"""Every split deals every sample once, ends, and does what its paper says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.data.split import chain as splits
from fedskew.data.split.allotment import among_open, capped_table, granted, slices
from fedskew.data.split.chain import Partition, make_partition, newcomers, portion, tail_counts
from fedskew.data.split.dirichlet import GroupedEqual
from fedskew.data.split.partitioners import PARTITIONERS

Labels = npt.NDArray[Any]
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def balanced(classes: int, each: int) -> Labels:
    return np.repeat(np.arange(classes), each)


def table(partition: Partition, y: Labels) -> npt.NDArray[np.int64]:
    labels = np.unique(y)
    return np.array([[(y[mine] == label).sum() for label in labels] for mine in partition.clients])


def sizes(partition: Partition) -> list[int]:
    return [len(mine) for mine in partition.clients]


def left_over(partition: Partition) -> int:
    return sum(int(note.split()[0]) for note in partition.notes if "left" in note)


@st.composite
def labels(draw: st.DrawFn, least: int = 12) -> Labels:
    """One to six classes of 12 to 40 samples each, in any order, named by any numbers."""
    names = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    counts = draw(st.lists(st.integers(least, 40), min_size=len(names), max_size=len(names)))
    return np.random.RandomState(draw(st.integers(0, 9))).permutation(np.repeat(names, counts))


ALPHA = st.sampled_from([0.3, 1.0, 100.0])
ANY_ALPHA = st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 1e6])
CLIENTS = st.integers(1, 12)
BOOL = st.sampled_from(["true", "false"])

# dealer -> a text that will do for C classes (12 samples or more each)
Text = Callable[[Callable[..., Any], int], str]
TEXTS: dict[str, Text] = {
    "iid": lambda d, C: f"iid:clients={d(CLIENTS)}",
    "dirichlet": lambda d, C: f"dirichlet:clients={d(st.integers(1, 4))},alpha={d(ALPHA)},cap={d(BOOL)},min=1",
    "dirichlet-mix": lambda d, C: (
        f"dirichlet-mix:clients={d(CLIENTS)},alpha={d(ANY_ALPHA)},prior={d(BOOL)},sigma={d(st.integers(0, 2))}"
    ),
    "grouped-equal": lambda d, C: f"grouped-equal:clients={d(CLIENTS)},alpha=20",
    "quantity": lambda d, C: f"quantity:clients={d(st.integers(1, 4))},alpha={d(ALPHA)},min=1",
    "lognormal": lambda d, C: f"lognormal:clients={d(CLIENTS)},sigma={d(st.sampled_from([0, 0.3, 5, 100]))}",
    "pcdd": lambda d, C: f"pcdd:clients={(N := d(CLIENTS))},classes={d(st.integers(-(-C // N), C))}",
    "label-k": lambda d, C: f"label-k:clients={(N := d(CLIENTS))},k={d(st.integers(1 if N >= C else C, C))}",
    "shards": lambda d, C: (
        f"shards:clients={d(CLIENTS)},pure=true,per_client={C}"
        if d(st.booleans())
        else f"shards:clients={d(st.integers(1, 4))},per_client={d(st.integers(1, 3))}"
    ),
    "two-class": lambda d, C: "two-class" if C > 1 else "iid:clients=1",
    "subset": lambda d, C: f"subset:clients={C * d(st.integers(1, 2))},share={d(st.sampled_from([0.5, 0.95]))}",
    "natural": lambda d, C: f"natural:min={d(st.integers(1, 3))}",
}
every_dealer = pytest.mark.parametrize("dealer", TEXTS)


def owners_of(y: Labels) -> Labels:
    return np.array([f"writer {i}" for i in np.random.RandomState(5).randint(0, 4, len(y))])


def drawn(data: st.DataObject, dealer: str, least: int = 12) -> tuple[str, Labels, int]:
    y = data.draw(labels(least))
    return TEXTS[dealer](data.draw, len(np.unique(y))), y, data.draw(st.integers(0, 99))


# --- what holds for every split


def test_every_dealer_is_in_the_property_tests() -> None:
    assert set(TEXTS) == set(PARTITIONERS) == set(splits.partitioners())


@every_dealer
@quick
@given(data=st.data())
def test_every_sample_goes_to_exactly_one_client(dealer: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, dealer)
    before = y.copy()
    partition = make_partition(text, y, seed=seed, owners=owners_of(y))
    everything = np.concatenate(partition.clients)
    assert len(np.unique(everything)) == len(everything), "a sample was dealt twice"
    assert 0 <= everything.min() <= everything.max() < len(y)
    assert len(everything) == len(y) - left_over(partition)
    assert min(sizes(partition)) >= 1
    assert all(mine.dtype == np.int64 for mine in (*partition.clients, partition.public))
    assert len(partition.public) == 0
    assert (y == before).all()


@every_dealer
@quick
@given(data=st.data())
def test_a_split_depends_on_its_seed_alone(dealer: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, dealer)
    np.random.seed(data.draw(st.integers(0, 9)))  # noqa: NPY002
    state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first, second = (make_partition(text, y, seed=seed, owners=owners_of(y)) for _ in range(2))
    assert [mine.tolist() for mine in first.clients] == [mine.tolist() for mine in second.clients]
    assert first.notes == second.notes
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]  # noqa: NPY002


@every_dealer
@quick
@given(data=st.data())
def test_the_names_of_the_labels_do_not_matter(dealer: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, dealer)
    other = 7 * np.unique(y, return_inverse=True)[1] + 3
    partition, renamed = (make_partition(text, labels, seed=seed, owners=owners_of(y)) for labels in (y, other))
    assert [mine.tolist() for mine in partition.clients] == [mine.tolist() for mine in renamed.clients]


@every_dealer
@quick
@given(data=st.data())
def test_after_cuts_a_split_deals_exactly_what_was_kept(dealer: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, dealer, least=16)
    partition = make_partition(f"public:per_class=0.25+{text}", y, seed=seed, owners=owners_of(y))
    each = int(0.25 * np.unique(y, return_counts=True)[1].min())
    assert set(np.unique(y[partition.public], return_counts=True)[1]) == {each}
    everything = np.concatenate([*partition.clients, partition.public])
    assert len(np.unique(everything)) == len(everything) == len(y) - left_over(partition)


@pytest.mark.parametrize(
    "text",
    [
        "iid",
        "dirichlet:alpha=0.1",
        "dirichlet-mix:alpha=0.1",
        "grouped-equal:alpha=0.1",
        "quantity",
        "lognormal:sigma=2",
        "pcdd:classes=3",
        "label-k:k=3",
        "shards:per_client=3",
        "shards:per_client=3,pure=true",
    ],
)
def test_one_client_gets_everything(text: str) -> None:
    y = np.array([3, 7, 9] * 8)
    (only,) = make_partition(f"{text}{',' if ':' in text else ':'}clients=1", y, seed=0).clients
    assert sorted(only) == list(range(24))


@pytest.mark.parametrize("dealer", sorted(PARTITIONERS))
def test_more_clients_than_samples_is_a_mistake(dealer: str) -> None:
    with pytest.raises(UsageError, match=r"clients=10 but there are only 9 samples"):
        make_partition(f"{dealer}:clients=10", balanced(3, 3), seed=0, owners=np.arange(9))


@pytest.mark.parametrize("text", ["dirichlet:alpha=0.3", "pcdd", "shards", "iid", "dirichlet-mix", "subset", "label-k"])
def test_another_seed_gives_another_split(text: str) -> None:
    y = balanced(10, 100)
    first, second = (make_partition(text, y, seed=seed).clients for seed in (0, 1))
    assert any(sorted(a) != sorted(b) for a, b in zip(first, second, strict=True))


def test_a_client_s_samples_are_not_in_the_order_of_their_labels() -> None:
    y = balanced(10, 1000)
    for text in ("pcdd:classes=5", "subset", "shards:per_client=5"):
        for mine in make_partition(text, y, seed=0).clients:
            assert (np.diff(y[mine]) < 0).any()


# --- the dealers


def test_iid_sizes_differ_by_at_most_one_and_classes_are_even() -> None:
    """103 of 4 classes over 10: sizes 10 or 11; over 10 clients of 1000, each class near 250 (5 sigma about 65)."""
    assert sorted(set(sizes(make_partition("iid", np.arange(103) % 4, seed=0)))) == [10, 11]
    y = balanced(4, 2500)
    assert np.abs(table(make_partition("iid", y, seed=0), y) - 250).max() < 65


def test_shares_are_cut_at_the_floor_of_their_running_sum() -> None:
    """7 x (.5, .8) = 3.5, 5.6: cuts at 3 and 5."""
    assert slices(np.array([0.5, 0.3, 0.2]), 7).tolist() == [3, 2, 2]


def test_a_client_at_its_even_share_gets_no_further_class() -> None:
    """n 10, N 3, sizes (4, 1, 1): the first has more than 10/3, so (.5,.3,.2) -> (0,.6,.4), cuts (0, 4) -> 0, 4, 3."""
    rng = np.random.RandomState(0)
    p = among_open(np.array([0.5, 0.3, 0.2]), np.array([4, 1, 1]) < 10 / 3, rng)
    assert slices(p, 7).tolist() == [0, 4, 3]
    both = [np.array([0.7, 0.15, 0.15]), np.array([0.5, 0.3, 0.2])]  # of 6 samples: cuts 4.2, 5.1
    assert capped_table(both, [6, 7], 10 / 3, rng).tolist() == [[4, 0], [1, 4], [1, 3]]


def test_shares_that_underflow_go_to_one_open_client() -> None:
    p = np.array([[np.nan] * 3, [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    is_open = np.array([[True, True, True], [True, False, True], [False, False, True]])
    shares = among_open(p, is_open, np.random.RandomState(0))
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
            mine = np.where(y == c)[0]
            rng.shuffle(mine)
            p = rng.dirichlet(np.repeat(alpha, N))
            p = np.array([share * (len(client) < len(y) / N) for share, client in zip(p, clients, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(mine)).astype(int)[:-1]
            clients = [a + b.tolist() for a, b in zip(clients, np.split(mine, cuts), strict=True)]
    for client in clients:
        rng.shuffle(client)
    return clients


def test_dirichlet_is_the_published_procedure_sample_for_sample() -> None:
    y = np.random.RandomState(1).permutation(balanced(5, 60))
    notes: list[str] = []
    for seed in range(8):
        partition = make_partition("dirichlet:alpha=0.2,clients=6,min=15", y, seed=seed)
        assert [mine.tolist() for mine in partition.clients] == published_dirichlet(y, 6, 0.2, 15, seed)
        notes += partition.notes
    assert notes, "no seed needed a redraw: the test is too easy"


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
def test_dirichlet_deals_everything_even_if_all_shares_underflow(alpha: float) -> None:
    y = balanced(10, 50)
    for cap in ("true", "false"):
        partition = make_partition(f"dirichlet:alpha={alpha},clients=3,cap={cap},min=1", y, seed=0)
        assert sorted(np.concatenate(partition.clients)) == list(range(500))
        assert (np.count_nonzero(table(partition, y), axis=0) == 1).all(), "a class on two clients"


def test_a_minimum_that_cannot_be_reached_says_the_largest_that_can() -> None:
    y = balanced(6, 10)
    for dealer in ("dirichlet", "quantity"):
        with pytest.raises(UsageError, match=r"min=50 cannot be reached: 60 samples over 10 clients allow at most 6"):
            make_partition(f"{dealer}:min=50", y, seed=0)
        with pytest.raises(UsageError, match=r"min=6 was not reached in 1000 draws, the largest minimum .* was [0-5];"):
            make_partition(f"{dealer}:min=6,alpha=0.5", y, seed=0)


def test_grouped_equal_sizes_are_equal_and_skew_is_left() -> None:
    """CIFAR-10-LT with factor 100 has 12,406 samples: 620 or 621 each over 20 clients."""
    partition = make_partition("longtail:factor=100+grouped-equal:alpha=0.1,clients=20", CIFAR10, seed=7)
    assert sorted(set(sizes(partition))) == [620, 621]
    assert partition.notes[0].endswith("redraws")
    assert np.count_nonzero(table(partition, CIFAR10), axis=1).mean() < 6


@quick
@given(N=st.integers(10, 34), seed=st.integers(0, 99))
def test_grouped_equal_keeps_a_group_s_samples_near_its_ten_clients(N: int, seed: int) -> None:
    """The first draw is the order of all samples; group g is its g-th stretch of 10 n / N."""
    y = balanced(4, 100)
    partition = make_partition(f"grouped-equal:clients={N},alpha=20", y, seed=seed)
    client = np.empty(400, int)
    for i, mine in enumerate(partition.clients):
        client[mine] = i
    order, size, groups = np.random.RandomState(seed).permutation(400), 4000 // N, -(-N // 10)
    for g in range(groups):
        members = client[order[g * size : (g + 1) * size if g < groups - 1 else 400]]
        assert 10 * g - 1 <= members.min() <= members.max() <= 10 * g + 10


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


def test_dirichlet_mix_does_not_leave_the_leftovers_to_the_last_clients() -> None:
    """A class of a tenth: both halves of the clients get about as much of it."""
    y = np.repeat([0, 1, 2], [4500, 4500, 1000])
    mix = table(make_partition("dirichlet-mix:alpha=1,clients=200", y, seed=0), y)
    assert abs(mix[:100, 2].sum() - mix[100:, 2].sum()) < 200


def test_a_stock_too_small_is_shared_among_those_who_asked() -> None:
    rng = np.random.RandomState(0)
    assert granted(np.array([2, 0, 3]), 5, rng).tolist() == [2, 0, 3]
    got = np.mean([granted(np.array([20, 0, 60]), 40, rng) for _ in range(50)], axis=0)
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


def test_pcdd_deals_the_classes_in_blocks_and_then_at_random() -> None:
    def held(text: str, y: Labels) -> list[list[int]]:
        return [np.unique(y[mine]).tolist() for mine in make_partition(text, y, seed=3).clients]

    y = balanced(10, 60)
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert held("pcdd:clients=5,classes=2", y) == pairs
    assert held("pcdd:clients=10,classes=2", y)[:5] == pairs
    assert held("pcdd:clients=10,classes=3", y)[:3] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert 9 in held("pcdd:clients=10,classes=3", y)[3]
    blocks = held("pcdd:clients=10,classes=10", CIFAR100)
    assert blocks == [list(range(10 * i, 10 * i + 10)) for i in range(10)]


def test_pcdd_random_labels_are_uniform() -> None:
    """After the five blocks, each of ten labels has a fifth of 995 clients: 199, sigma 12.6."""
    owned = table(make_partition("pcdd:clients=1000,classes=2", balanced(10, 5000), seed=0), balanced(10, 5000)) > 0
    assert np.abs(owned[5:].sum(axis=0) - 199).max() < 5 * 12.6


def test_pcdd_with_all_classes_is_iid() -> None:
    y = balanced(5, 40)
    same = zip(
        make_partition("pcdd:clients=4,classes=5", y, seed=1).clients,
        make_partition("iid:clients=4", y, seed=1).clients,
        strict=True,
    )
    assert all((a == b).all() for a, b in same)


@pytest.mark.parametrize(("name", "key"), [("pcdd", "classes"), ("label-k", "k")])
@quick
@given(C=st.integers(3, 8), N=st.integers(8, 20), seed=st.integers(0, 99), data=st.data())
def test_every_client_has_exactly_k_classes_in_equal_parts(
    name: str, key: str, C: int, N: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, C - 1))
    y = np.repeat(np.arange(C), 20 + np.arange(C))
    found = table(make_partition(f"{name}:clients={N},{key}={k}", y, seed=seed), y)
    assert (np.count_nonzero(found, axis=1) == k).all()
    for column in found.T:
        parts = column[column > 0]
        assert len(parts) >= 1
        assert parts.max() - parts.min() <= 1
    if name == "label-k":
        assert all(found[i, i % C] > 0 for i in range(N))


def test_label_k_with_too_few_clients_says_so_or_deals_every_class() -> None:
    with pytest.raises(UsageError, match=r"10 clients with k=2 cannot hold all 100 classes; use k=10 or clients=50"):
        make_partition("label-k:clients=10,k=2", CIFAR100, seed=0)
    with pytest.raises(UsageError, match="pcdd, which deals every class"):
        make_partition("label-k:clients=10,k=10", CIFAR100, seed=0)
    y = balanced(5, 20)
    for seed in range(10):  # four clients, five classes: a draw often leaves one out and is thrown away
        assert sum(sizes(make_partition("label-k:clients=4,k=2", y, seed=seed))) == 100


def test_a_client_without_a_sample_is_a_mistake_and_a_thin_class_a_note() -> None:
    """Class 1 has two samples for its owners: with one class each some get none."""
    y = np.repeat([0, 1], [50, 2])
    with pytest.raises(UsageError, match="clients without a sample"):
        make_partition("label-k:clients=10,k=1", y, seed=0)
    y = np.repeat([0, 1, 2], [50, 50, 2])
    partition = make_partition("label-k:clients=20,k=2", y, seed=0)
    assert partition.notes == ("1 classes have fewer samples than clients that should hold them",)
    assert sum(sizes(partition)) == 102


def test_shards_give_the_known_mix_of_mnist() -> None:
    """200 shards of 300: a client sees one class in 8.9 %, two in 84.3 %, three in 6.7 % of cases."""
    y = np.random.RandomState(0).permutation(MNIST)
    found = [make_partition("shards:clients=100,per_client=2", y, seed=seed) for seed in range(20)]
    assert {size for partition in found for size in sizes(partition)} == {600}
    held = np.concatenate([[len(np.unique(y[mine])) for mine in partition.clients] for partition in found])
    shares = np.bincount(held, minlength=5)[1:4] / len(held)
    assert np.abs(shares - [0.089, 0.843, 0.067]).max() < 0.025


def test_shards_leave_over_what_does_not_divide() -> None:
    partition = make_partition("shards:clients=4,per_client=3", np.arange(103) % 5, seed=0)
    assert sizes(partition) == [24] * 4
    assert partition.notes == ("7 samples left over",)


@quick
@given(N=st.sampled_from([5, 10, 15]), s=st.integers(1, 3), seed=st.integers(0, 99))
def test_pure_shards_have_one_label_each(N: int, s: int, seed: int) -> None:
    """Five classes of 61: N s / 5 shards per class, sizes within one."""
    y = balanced(5, 61)
    found = table(make_partition(f"shards:clients={N},per_client={s},pure=true", y, seed=seed), y)
    shard = 61 // (N * s // 5)
    assert found.sum() == 305
    assert (np.count_nonzero(found, axis=1) <= s).all()
    assert s * shard <= found.sum(axis=1).min() <= found.sum(axis=1).max() <= s * (shard + 1)


@quick
@given(C=st.integers(2, 12), seed=st.integers(0, 999))
def test_two_class_gives_two_halves_of_different_classes(C: int, seed: int) -> None:
    y = np.repeat(np.arange(C), 2 * np.arange(5, C + 5))
    found = table(make_partition("two-class", y, seed=seed), y)
    assert (np.count_nonzero(found, axis=1) == 2).all()
    assert (np.count_nonzero(found, axis=0) == 2).all()
    assert all(set(column[column > 0]) == {5 + c} for c, column in enumerate(found.T))


@pytest.mark.parametrize("N", [10, 100])
def test_subset_gives_the_dominant_class_its_true_share(N: int) -> None:
    """With g = N/C: (.95/g) / (.95/g + 9 (.05)/(N-g)) = .95 for ten even classes, also for N = 100."""
    y = balanced(10, 6000)
    found = table(make_partition(f"subset:clients={N}", y, seed=0), y)
    share = found / found.sum(axis=1, keepdims=True)
    assert (share.argmax(axis=1) == np.arange(N) % 10).all()
    assert np.abs(share.max(axis=1) - 0.95).max() < 0.01
    assert found.min() >= 1


def test_subset_notes_classes_too_small_for_every_client() -> None:
    assert make_partition("subset", balanced(10, 60), seed=0).notes == (
        "10 classes have too few samples to be on every client",
    )


def test_natural_gives_all_samples_of_the_chosen_owners() -> None:
    """Owners a (3 samples), b (1), c (2), d (2): with min=2, a, c and d; two of them by seed, in the order of names."""
    owners = np.array(list("dacabcad"))
    y = np.zeros(8, int)
    everyone = make_partition("natural", y, seed=0, owners=owners)
    assert [sorted(mine) for mine in everyone.clients] == [[1, 3, 6], [4], [2, 5], [0, 7]]
    three = make_partition("natural:min=2", y, seed=0, owners=owners)
    assert [sorted(mine) for mine in three.clients] == [[1, 3, 6], [2, 5], [0, 7]]
    assert three.notes == ("1 samples of 1 owners left out",)
    chosen = {
        str([sorted(m.tolist()) for m in make_partition("natural:clients=2,min=2", y, seed=s, owners=owners).clients])
        for s in range(20)
    }
    assert chosen == {"[[1, 3, 6], [2, 5]]", "[[1, 3, 6], [0, 7]]", "[[2, 5], [0, 7]]"}


# --- cuts and features


@pytest.mark.parametrize(
    ("head", "factor", "counts"),
    [
        (5000, 10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (5000, 50, [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100]),
        (5000, 100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
        (4900, 100, [4900, 2937, 1760, 1055, 632, 379, 227, 136, 81, 49]),
    ],
)
def test_long_tail_counts_are_the_published_ones(head: int, factor: int, counts: list[int]) -> None:
    assert tail_counts(head, 10, factor) == counts


@pytest.mark.parametrize(
    ("classes", "head", "sums", "last"),
    [
        (10, 5000, [20431, 13996, 12406], [500, 100, 50]),
        (10, 4900, [20021, 13717, 12156], [490, 98, 49]),
        (100, 500, [19573, 12608, 10847], [50, 10, 5]),
        (100, 490, [19183, 12354, 10626], [49, 9, 4]),
    ],
)
def test_long_tail_sums_are_the_published_ones(classes: int, head: int, sums: list[int], last: list[int]) -> None:
    """The order of operations decides whether a value just under an integer loses one."""
    found = [tail_counts(head, classes, factor) for factor in (10, 50, 100)]
    assert [sum(counts) for counts in found] == sums
    assert [counts[-1] for counts in found] == last


@pytest.mark.parametrize("text", ["longtail:factor=100,public=0.02", "public:per_class=100+longtail:factor=100"])
def test_the_public_set_is_cut_before_the_tail(text: str) -> None:
    """FEDIC: 100 of each class first, so the head has 4900."""
    partition = make_partition(f"{text}+dirichlet:alpha=0.1,clients=20", CIFAR10, seed=0, classes=10)
    assert np.bincount(CIFAR10[partition.public]).tolist() == [100] * 10
    assert table(partition, CIFAR10).sum(axis=0).tolist() == [4900, 2937, 1760, 1055, 632, 379, 227, 136, 81, 49]
    assert not np.intersect1d(partition.public, np.concatenate(partition.clients)).size


def test_the_head_of_unequal_classes_is_the_smallest_and_a_public_fraction_too() -> None:
    """MNIST: a fiftieth of the smallest class (5421) is 108 of each; 5313 are left for the head."""
    partition = make_partition("longtail:factor=10,public=0.02+iid", MNIST, seed=0)
    assert set(np.bincount(MNIST[partition.public])) == {108}
    assert table(partition, MNIST).sum(axis=0).tolist() == tail_counts(5313, 10, 10)


def test_cuts_choose_by_seed_and_keep_the_same_samples_for_every_dealer() -> None:
    y = balanced(4, 50)
    first, same, other = (
        np.sort(np.concatenate(make_partition(f"longtail:factor=5+{dealer}", y, seed=seed).clients)).tolist()
        for dealer, seed in (("iid", 0), ("lognormal", 0), ("iid", 1))
    )
    assert first == same != other


def test_sample_keeps_a_count_or_a_fraction() -> None:
    y = balanced(4, 50)
    assert (
        sum(sizes(make_partition("sample:keep=0.29+iid", np.arange(100), seed=0))) == 29
    )  # 0.29 * 100 is 28.999999999999996
    partition = make_partition("sample:keep=40+iid", y, seed=0)
    assert sum(sizes(partition)) == 40
    assert np.concatenate(partition.clients).max() > 100


def test_a_public_set_after_another_cut_is_in_terms_of_the_whole_pool() -> None:
    y = np.random.RandomState(0).permutation(balanced(4, 50))
    partition = make_partition("sample:keep=100+public:per_class=5+iid", y, seed=0)
    assert np.bincount(y[partition.public]).tolist() == [5] * 4
    assert len(np.unique(np.concatenate([*partition.clients, partition.public]))) == 100


def test_noise_grows_with_the_client_and_rotation_goes_round() -> None:
    partition = make_partition("iid:clients=5+noise:level=0.1+rotate:turns=4", balanced(2, 10), seed=0)
    assert partition.noise == pytest.approx((0, 0.025, 0.05, 0.075, 0.1))
    assert list(partition.rotation or ()) == [0, 90, 180, 270, 0]
    assert make_partition("iid:clients=1+noise", balanced(2, 10), seed=0).noise == (0.0,)
    plain = make_partition("iid:clients=5", balanced(2, 10), seed=0)
    assert plain.noise is None
    assert plain.rotation is None
    assert all((a == b).all() for a, b in zip(plain.clients, partition.clients, strict=True))


# --- mistakes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dirichlet:alpha=0", "alpha must be positive.*use iid"),
        ("dirichlet-mix:alpha=-1", "alpha must be positive.*use iid"),
        ("grouped-equal:alpha=nan", "alpha must be positive"),
        ("quantity:alpha=inf", "alpha must be positive"),
        ("dirichlett", "did you mean 'dirichlet'"),
        ("iid:alpha=1", "unknown setting of split 'iid' 'alpha'"),
        ("iid:clients=0", "clients='0' will not do"),
        ("longtail:factor=10", "then one dealer"),
        ("iid+longtail", "write cuts"),
        ("noise+iid", "write cuts"),
        ("iid+shards", "then one dealer"),
        ("iid+noise+noise", "noise twice"),
        ("longtail:factor=0.1+iid", "factor='0.1' will not do"),
        ("longtail:factor=101+iid", "leaves a class empty; at most 100"),
        ("public:per_class=100+iid", "count from 1 to 99"),
        ("public:per_class=1.5+iid", "count from 1 to 99"),
        ("longtail:public=0.001+iid", "longtail: public=0.001 will not do"),
        ("sample:keep=0+iid", "keep=0 will not do"),
        ("pcdd:clients=4,classes=2", "use classes=3 or clients=5 or more"),
        ("pcdd:classes=11", "only 10 classes"),
        ("label-k:k=11", "only 10 classes"),
        ("shards:clients=7,pure=true", "multiple of the 10 classes, got 14"),
        ("shards:clients=600", "1200 shards of only 1000"),
        ("two-class:clients=20", "there are 10 classes and clients=20"),
        ("subset:clients=15", "20 would do"),
        ("subset:share=1", "share='1' will not do"),
        ("natural", "say who made each sample"),
        ("iid+noise:level=-1", "level='-1' will not do"),
    ],
)
def test_a_mistake_in_the_text_is_said_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_partition(text, balanced(10, 100), seed=0)


def test_other_mistakes_are_said_too() -> None:
    y = balanced(3, 10)
    with pytest.raises(UsageError, match="0 of 3 owners have min=11 samples or more"):
        make_partition("natural:min=11", y, seed=0, owners=y)
    with pytest.raises(UsageError, match=r"3 of 3 owners have min=1 .* too few for clients=4"):
        make_partition("natural:clients=4", y, seed=0, owners=y)
    with pytest.raises(UsageError, match="seed must be"):
        make_partition("iid", y, seed=-1)
    with pytest.raises(UsageError, match="labels from 0 to 2 do not fit classes=2"):
        make_partition("iid", y, seed=0, classes=2)
    with pytest.raises(UsageError, match="only 0 samples"):
        make_partition("iid", y[:0], seed=0, classes=2)
    with pytest.raises(UsageError, match="two classes or more"):
        make_partition("two-class", y[:10], seed=0)
    assert make_partition("iid", y, seed=0, classes=5).notes == ("2 of 5 classes have no samples",)


# --- parts and newcomers


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
    for mine, part in zip(clients, parts, strict=True):
        assert sorted([*part.train, *part.validation, *part.test]) == mine.tolist()
        assert len(part.train) >= 1
        wanted = [len(mine) - round((1 - share) * len(mine)) for share in (validation, test)]
        if sum(wanted) < len(mine):
            assert [len(part.validation), len(part.test)] == wanted


def test_parts_are_random_and_a_client_s_own() -> None:
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


def test_newcomers_are_a_sorted_choice_that_leaves_someone_to_train() -> None:
    held = newcomers(100, 0.4, seed=0)
    assert len(set(held)) == 40
    assert list(held) == sorted(held)
    assert 0 <= held[0] <= held[-1] < 100
    assert held == newcomers(100, 40, seed=0) != newcomers(100, 40, seed=1)
    assert newcomers(5, 0, seed=0) == ()
    with pytest.raises(UsageError, match="newcomers=5 will not do"):
        newcomers(5, 5, seed=0)


def test_the_list_of_splits_shows_settings_and_defaults() -> None:
    assert splits.partitioners()["dirichlet"].endswith("(clients=10, alpha=0.5, cap=true, min=10)")
    assert splits.partitioners()["natural"].endswith("(clients, min=1)")
    assert set(splits.cuts()) == {"public", "longtail", "sample"}
    assert set(splits.features()) == {"noise", "rotate"}
