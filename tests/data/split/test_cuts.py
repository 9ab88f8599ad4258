"""Cuts and features: public sets, long tails, samples; noise and rotation."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew.data.split.chain import make_partition
from fedskew.data.split.cuts import longtail_counts
from helpers.splits import CIFAR10, MNIST, balanced, sizes, table


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
    assert longtail_counts(head, 10, factor) == counts


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
    found = [longtail_counts(head, classes, factor) for factor in (10, 50, 100)]
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
    assert table(partition, MNIST).sum(axis=0).tolist() == longtail_counts(5313, 10, 10)


def test_cuts_choose_by_seed_and_keep_the_same_samples_for_every_partitioner() -> None:
    y = balanced(4, 50)
    first, same, other = (
        np.sort(np.concatenate(make_partition(f"longtail:factor=5+{partitioner}", y, seed=seed).clients)).tolist()
        for partitioner, seed in (("iid", 0), ("lognormal", 0), ("iid", 1))
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
