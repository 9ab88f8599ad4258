"""The partitioners that count classes, shards or owners do what their papers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.data.split.chain import make_partition
from helpers.splits import CIFAR100, MNIST, Labels, balanced, quick, sizes, table


def test_iid_sizes_differ_by_at_most_one_and_classes_are_even() -> None:
    """103 of 4 classes over 10: sizes 10 or 11; over 10 clients of 1000, each class near 250 (5 sigma about 65)."""
    assert sorted(set(sizes(make_partition("iid", np.arange(103) % 4, seed=0)))) == [10, 11]
    y = balanced(4, 2500)
    assert np.abs(table(make_partition("iid", y, seed=0), y) - 250).max() < 65


def test_pcdd_assigns_the_classes_in_blocks_and_then_at_random() -> None:
    def held(text: str, y: Labels) -> list[list[int]]:
        return [np.unique(y[samples]).tolist() for samples in make_partition(text, y, seed=3).clients]

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


def test_label_k_with_too_few_clients_says_so_or_assigns_every_class() -> None:
    with pytest.raises(
        UsageError, match=r"10 clients with k=2 cannot hold all 100 classes: expected k=10 or clients=50"
    ):
        make_partition("label-k:clients=10,k=2", CIFAR100, seed=0)
    with pytest.raises(UsageError, match="pcdd, which assigns every class"):
        make_partition("label-k:clients=10,k=10", CIFAR100, seed=0)
    y = balanced(5, 20)
    for seed in range(10):  # four clients, five classes: a draw often leaves one out and is thrown away
        assert sum(sizes(make_partition("label-k:clients=4,k=2", y, seed=seed))) == 100


def test_a_client_without_a_sample_is_an_error_and_a_class_too_small_for_its_clients_a_note() -> None:
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
    held = np.concatenate([[len(np.unique(y[samples])) for samples in partition.clients] for partition in found])
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


def test_two_class_never_leaves_both_halves_of_a_class_with_one_client() -> None:
    """With three classes a random pairing does so in most draws, and a swap of a client with itself would keep it."""
    y = balanced(3, 4)
    for seed in range(60):
        mix = table(make_partition("two-class", y, seed=seed), y)
        assert np.count_nonzero(mix, axis=1).tolist() == [2, 2, 2]


def test_subset_shares_by_hand() -> None:
    """Two classes of 100 over two clients with share .75: each has 75 of its main class and 25 of the other."""
    y = balanced(2, 100)
    assert table(make_partition("subset:clients=2,share=0.75", y, seed=0), y).tolist() == [[75, 25], [25, 75]]


def test_subset_notes_classes_too_small_for_every_client() -> None:
    assert make_partition("subset", balanced(10, 60), seed=0).notes == (
        "10 classes have too few samples to be on every client",
    )


def test_natural_gives_all_samples_of_the_chosen_owners() -> None:
    """Owners a (3 samples), b (1), c (2), d (2): with min=2, a, c and d; two of them by seed, in the order of names."""
    owners = np.array(list("dacabcad"))
    y = np.zeros(8, int)
    everyone = make_partition("natural", y, seed=0, owners=owners)
    assert [sorted(samples) for samples in everyone.clients] == [[1, 3, 6], [4], [2, 5], [0, 7]]
    three = make_partition("natural:min=2", y, seed=0, owners=owners)
    assert [sorted(samples) for samples in three.clients] == [[1, 3, 6], [2, 5], [0, 7]]
    assert three.notes == ("1 samples of 1 owners left out",)
    chosen = {
        str([sorted(m.tolist()) for m in make_partition("natural:clients=2,min=2", y, seed=s, owners=owners).clients])
        for s in range(20)
    }
    assert chosen == {"[[1, 3, 6], [2, 5]]", "[[1, 3, 6], [0, 7]]", "[[2, 5], [0, 7]]"}


def test_owners_stay_with_their_samples_after_a_cut() -> None:
    owners = np.random.RandomState(1).permutation(np.repeat(np.arange(5), 20))
    partition = make_partition("sample:keep=60+natural", np.zeros(100, int), seed=0, owners=owners)
    assert [set(owners[samples]) for samples in partition.clients] == [{0}, {1}, {2}, {3}, {4}]
