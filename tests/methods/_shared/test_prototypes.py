"""Class means, and their pooling over a stream of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from fedskew.core.method import Update
from fedskew.core.tensors import Tensors
from fedskew.methods._shared.prototypes import GROUP, PrototypeMean, class_means, no_prototypes, prototypes_of
from fedskew.methods.fedavg import FedAvg
from toys import digits


def prototypes(mean: list[list[float]], count: list[float]) -> Tensors:
    return Tensors(mean=tensor(mean, dtype=torch.float32), count=tensor(count, dtype=torch.float32))


def pooled(*sent: Tensors, old: Tensors | None = None, uniform: bool = False) -> Tensors:
    nothing = Tensors({name: torch.zeros_like(t) for name, t in sent[0].items()}) if sent else None
    pool = PrototypeMean(old or nothing or prototypes([[0, 0]], [0]), uniform=uniform)
    for own in sent:
        pool.add(own)
    return pool.value()


def test_a_prototype_is_the_mean_feature_of_its_class() -> None:
    """Class 0 from (1,0), (3,2) is (2,1); class 1 from (0,4) is (0,4); class 2 has none."""
    made = class_means(tensor([[1.0, 0], [0, 4], [3, 2]]), tensor([0, 1, 0]), 3)
    assert_close(made["mean"], tensor([[2.0, 1], [0, 4], [0, 0]]))
    assert_close(made["count"], tensor([2.0, 1, 0]))


def test_a_mean_of_many_samples_is_exact() -> None:
    """100 000 times 0.1: a float32 sum would be off in the fourth digit."""
    made = class_means(torch.full((100_000, 1), 0.1), torch.zeros(100_000, dtype=torch.int64), 1)
    assert made["mean"].item() == pytest.approx(0.1, rel=1e-7)


def test_a_site_s_prototypes_are_in_evaluation_mode_over_all_its_data() -> None:
    world = digits(FedAvg())
    site = world.site(0, 0, "train")
    site.load()
    x, y = site.data.take(torch.arange(len(site.data)))
    with torch.no_grad():
        features = site.net.eval().body(x)
    made = prototypes_of(site)
    c = int(y[0])
    assert_close(made["mean"][c], features[y == c].mean(0))
    assert made["count"].sum() == len(site.data)
    empty = no_prototypes(site)
    assert {name: t.shape for name, t in empty.items()} == {name: t.shape for name, t in made.items()}
    assert not any(t.any() for t in empty.values())


def test_pooling_weighs_by_samples() -> None:
    """N = (100, 300), g = (1,1), (3,5): (100 (1,1) + 300 (3,5)) / 400 = (2.5, 4)."""
    both = pooled(prototypes([[1, 1]], [100]), prototypes([[3, 5]], [300]))
    assert_close(both["mean"], tensor([[2.5, 4.0]]))
    assert_close(both["count"], tensor([400.0]))


def test_uniform_pooling_counts_each_holder_once() -> None:
    """(1,0) and (0,2) behind 1 and 3 samples: uniform (.5, 1), by samples (.25, 1.5). A non-holder is not in it."""
    sent = prototypes([[1, 0]], [1]), prototypes([[9, 9]], [0]), prototypes([[0, 2]], [3])
    assert_close(pooled(*sent, uniform=True)["mean"], tensor([[0.5, 1.0]]))
    assert_close(pooled(*sent)["mean"], tensor([[0.25, 1.5]]))
    assert_close(pooled(*sent, uniform=True)["count"], tensor([4.0]))


def test_without_one_sender_the_other_s_prototype_remains() -> None:
    left = pooled(prototypes([[1, 1]], [0]), prototypes([[3, 5]], [300]))
    assert_close(left["mean"], tensor([[3.0, 5.0]]))


@pytest.mark.parametrize("uniform", [False, True])
def test_a_class_that_no_client_sends_keeps_its_last_prototype_and_count(uniform: bool) -> None:
    old = prototypes([[7, 8], [5, 6], [0, 0]], [40, 50, 0])
    new = pooled(prototypes([[1, 1], [0, 0], [0, 0]], [2, 0, 0]), old=old, uniform=uniform)
    assert_close(new["mean"], tensor([[1.0, 1], [5, 6], [0, 0]]))
    assert_close(new["count"], tensor([2.0, 50, 0]))
    assert_close(pooled(old=old, uniform=uniform), old)


def test_pooling_leaves_its_arguments_alone() -> None:
    old, own = prototypes([[7, 8]], [40]), prototypes([[1, 1]], [2])
    pooled(own, own, old=old)
    assert_close(old, prototypes([[7, 8]], [40]))
    assert_close(own, prototypes([[1, 1]], [2]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_pooled_prototypes_are_those_of_the_pooled_data(seed: int, clients: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    shares: list[tuple[Tensor, Tensor]] = [
        (torch.randn(n, 3, generator=rng), torch.randint(4, (n,), generator=rng)) for n in range(1, clients + 1)
    ]
    apart = pooled(*(class_means(z, y, 4) for z, y in shares))
    together = class_means(torch.cat([z for z, _ in shares]), torch.cat([y for _, y in shares]), 4)
    assert_close(apart, together)


def test_a_watched_stream_passes_unchanged_one_update_at_a_time() -> None:
    made: list[Update] = []

    def stream() -> Iterator[Update]:
        for value in (1.0, 3.0):
            made.append(Update({GROUP: prototypes([[value]], [1])}, 1.0))
            yield made[-1]

    pool = PrototypeMean(prototypes([[0]], [0]))
    for seen, update in enumerate(pool.watch(stream()), start=1):
        assert len(made) == seen
        assert update is made[-1]
    assert_close(pool.value()["mean"], tensor([[2.0]]))
