"""Every split assigns every sample once, ends, and depends on its text, the labels and the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.data.split.chain import listing, make_partition
from fedskew.data.split.partitioners import PARTITIONERS
from helpers.splits import Labels, balanced, labels, left_over, quick, sizes

ALPHA = st.sampled_from([0.3, 1.0, 100.0])
ANY_ALPHA = st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 1e6])
CLIENTS = st.integers(1, 12)
BOOL = st.sampled_from(["true", "false"])

# partitioner -> a valid text for C classes (12 samples or more each)
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
every_partitioner = pytest.mark.parametrize("partitioner", TEXTS)


def owners_of(y: Labels) -> Labels:
    return np.array([f"writer {i}" for i in np.random.RandomState(5).randint(0, 4, len(y))])


def drawn(data: st.DataObject, partitioner: str, least: int = 12) -> tuple[str, Labels, int]:
    y = data.draw(labels(least))
    return TEXTS[partitioner](data.draw, len(np.unique(y))), y, data.draw(st.integers(0, 99))


# --- what holds for every split


def test_every_partitioner_is_in_the_property_tests() -> None:
    assert set(TEXTS) == set(PARTITIONERS) == set(listing()["partitioner"])


@every_partitioner
@quick
@given(data=st.data())
def test_every_sample_goes_to_exactly_one_client(partitioner: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, partitioner)
    before = y.copy()
    partition = make_partition(text, y, seed=seed, owners=owners_of(y))
    everything = np.concatenate(partition.clients)
    assert len(np.unique(everything)) == len(everything), "a sample was assigned twice"
    assert 0 <= everything.min() <= everything.max() < len(y)
    assert len(everything) == len(y) - left_over(partition)
    assert min(sizes(partition)) >= 1
    assert all(samples.dtype == np.int64 for samples in (*partition.clients, partition.public))
    assert len(partition.public) == 0
    assert (y == before).all()


@every_partitioner
@quick
@given(data=st.data())
def test_a_split_depends_on_its_seed_alone(partitioner: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, partitioner)
    np.random.seed(data.draw(st.integers(0, 9)))  # noqa: NPY002
    state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first, second = (make_partition(text, y, seed=seed, owners=owners_of(y)) for _ in range(2))
    assert [samples.tolist() for samples in first.clients] == [samples.tolist() for samples in second.clients]
    assert first.notes == second.notes
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]  # noqa: NPY002


@every_partitioner
@quick
@given(data=st.data())
def test_the_names_of_the_labels_do_not_matter(partitioner: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, partitioner)
    other = 7 * np.unique(y, return_inverse=True)[1] + 3
    partition, renamed = (make_partition(text, labels, seed=seed, owners=owners_of(y)) for labels in (y, other))
    assert [samples.tolist() for samples in partition.clients] == [samples.tolist() for samples in renamed.clients]


@every_partitioner
@quick
@given(data=st.data())
def test_after_cuts_a_split_assigns_exactly_what_is_left(partitioner: str, data: st.DataObject) -> None:
    text, y, seed = drawn(data, partitioner, least=16)
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


@pytest.mark.parametrize("partitioner", sorted(PARTITIONERS))
def test_more_clients_than_samples_is_an_error(partitioner: str) -> None:
    with pytest.raises(UsageError, match=r"clients=10 is invalid: expected at most 9"):
        make_partition(f"{partitioner}:clients=10", balanced(3, 3), seed=0, owners=np.arange(9))


@pytest.mark.parametrize("text", ["dirichlet:alpha=0.3", "pcdd", "shards", "iid", "dirichlet-mix", "subset", "label-k"])
def test_another_seed_gives_another_split(text: str) -> None:
    y = balanced(10, 100)
    first, second = (make_partition(text, y, seed=seed).clients for seed in (0, 1))
    assert any(sorted(a) != sorted(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "label-k:clients=4,k=4",
        "shards:clients=4,per_client=4,pure=true",
        "two-class",
        "subset:clients=4",
        "dirichlet-mix",
    ],
)
def test_which_samples_of_a_class_a_client_gets_is_random(text: str) -> None:
    """Unshuffled, the samples of one class on one client would be neighbours in the pool."""
    y = balanced(4, 100)
    for samples in make_partition(text, y, seed=0).clients:
        for c in range(4):
            of_class = np.sort(samples[y[samples] == c])
            assert len(of_class) < 5 or (np.diff(of_class) > 1).any()


def test_a_client_s_samples_are_not_in_the_order_of_their_labels() -> None:
    y = balanced(10, 1000)
    for text in ("pcdd:classes=5", "subset", "shards:per_client=5"):
        for samples in make_partition(text, y, seed=0).clients:
            assert (np.diff(y[samples]) < 0).any()


# --- errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dirichlet:alpha=0", "is invalid: expected above 0.*use iid"),
        ("dirichlet-mix:alpha=-1", "is invalid: expected above 0.*use iid"),
        ("grouped-equal:alpha=nan", "is invalid: expected above 0"),
        ("quantity:alpha=inf", "is invalid: expected above 0"),
        ("dirichlett", "did you mean 'dirichlet'"),
        ("iid:alpha=1", "unknown setting of split 'iid' 'alpha'"),
        ("iid:clients=0", "clients='0' .*: expected a whole number of at least 1"),
        ("longtail:factor=10", "then one partitioner"),
        ("iid+longtail", "expected cuts .*then one partitioner"),
        ("noise+iid", "expected cuts .*then one partitioner"),
        ("iid+shards", "then one partitioner"),
        ("iid+noise+noise", "expected noise once"),
        ("longtail:factor=0.1+iid", "factor='0.1' .*: expected a number of at least 1"),
        ("longtail:factor=101+iid", "factor=101 is invalid.*expected at most 100"),
        ("public:per_class=100+iid", "count from 1 to 99"),
        ("public:per_class=1.5+iid", "count from 1 to 99"),
        (
            "longtail:public=0.001+iid",
            "longtail: public=0.001 is invalid: expected a count from 1 to 99, or a fraction",
        ),
        ("sample:keep=0+iid", "keep=0 is invalid"),
        ("pcdd:clients=4,classes=2", "expected classes=3 or clients=5 or more"),
        ("pcdd:classes=11", "=11 is invalid: expected at most 10"),
        ("label-k:k=11", "=11 is invalid: expected at most 10"),
        ("shards:clients=7,pure=true", "multiple of the 10 classes, got 14"),
        ("shards:clients=600", "clients=600 x per_client=2 is invalid: expected at most 1000"),
        ("two-class:clients=20", "clients=20 is invalid for 10 classes"),
        ("subset:clients=15", "clients=15 is invalid: expected a multiple of the 10 classes, such as 20"),
        ("subset:share=1", "share='1' .*: expected a number above 0 and below 1"),
        ("natural", "say who made each sample"),
        ("iid+noise:level=-1", "level='-1' .*: expected a number of at least 0"),
    ],
)
def test_an_invalid_text_is_an_error_that_says_what_is_expected(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_partition(text, balanced(10, 100), seed=0)


def test_invalid_seeds_labels_and_owners_are_errors() -> None:
    y = balanced(3, 10)
    with pytest.raises(UsageError, match="0 of 3 owners have min=11 samples or more"):
        make_partition("natural:min=11", y, seed=0, owners=y)
    with pytest.raises(UsageError, match=r"3 of 3 owners have min=1 .* too few for clients=4"):
        make_partition("natural:clients=4", y, seed=0, owners=y)
    with pytest.raises(UsageError, match="seed=-1 is invalid: expected a number from 0"):
        make_partition("iid", y, seed=-1)
    with pytest.raises(UsageError, match="labels from 0 to 2 are invalid for classes=2: expected 0 to 1"):
        make_partition("iid", y, seed=0, classes=2)
    with pytest.raises(UsageError, match="expected at most 0"):
        make_partition("iid", y[:0], seed=0, classes=2)
    with pytest.raises(UsageError, match="two classes or more"):
        make_partition("two-class", y[:10], seed=0)
    assert make_partition("iid", y, seed=0, classes=5).notes == ("2 of 5 classes have no samples",)


# --- the list


def test_the_list_of_splits_shows_settings_and_defaults() -> None:
    assert listing()["partitioner"]["dirichlet"].endswith("(clients=10, alpha=0.5, cap=true, min=10)")
    assert listing()["partitioner"]["natural"].endswith("(clients, min=1)")
    assert set(listing()["cut"]) == {"public", "longtail", "sample"}
    assert set(listing()["feature"]) == {"noise", "rotate", "colour", "resolution", "concept"}
