import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedskew.core.seeding import seeded
from fedskew.core.tensors import Mean, Tensors, weighted_mean


def two() -> tuple[Tensors, Tensors]:
    return Tensors(a=torch.tensor([1.0, 2.0]), b=torch.tensor(3.0)), Tensors(
        a=torch.tensor([4.0, 6.0]), b=torch.tensor(-1.0)
    )


def test_arithmetic_works_name_by_name() -> None:
    x, y = two()
    assert (x + y)["a"].tolist() == [5, 8]
    assert (x - y)["b"] == 4
    assert (2 * x)["a"].tolist() == [2, 4]
    assert (x / 4)["b"] == 0.75
    assert x.dot(y) == 1 * 4 + 2 * 6 + 3 * -1
    assert x["a"].tolist() == [1, 2]


def test_names_must_match() -> None:
    x, _ = two()
    with pytest.raises(ValueError, match="'a'"):
        x + Tensors(b=torch.tensor(1.0))


def test_overlay_keeps_order_and_the_right_side_wins() -> None:
    x, y = two()
    z = x | {"b": y["b"], "c": y["a"]}
    assert list(z) == ["a", "b", "c"]
    assert z["b"] == -1


def test_split_by_prefix_leaves_nothing_out_and_the_empty_prefix_takes_nothing() -> None:
    t = Tensors({"body.w": torch.ones(1), "head.w": torch.zeros(1)})
    rest, head = t.split(("head.",))
    assert (list(rest), list(head)) == (["body.w"], ["head.w"])
    assert list(t.split(())[0]) == ["body.w", "head.w"]


def test_weighted_mean_of_floats_is_by_weight_and_of_counters_the_largest() -> None:
    """(1 * 1 + 3 * 5) / 4 = 4; counters of batches are not averaged: max(10, 20), in either order."""
    items = [
        (Tensors(w=torch.tensor(1.0), n=torch.tensor(10)), 1.0),
        (Tensors(w=torch.tensor(5.0), n=torch.tensor(20)), 3.0),
    ]
    mean = weighted_mean(items)
    assert mean["w"] == 4.0
    assert mean["n"] == weighted_mean(reversed(items))["n"] == 20
    assert mean["n"].dtype == torch.int64


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_mean_does_not_touch_what_it_is_given(kind: torch.dtype) -> None:
    t = Tensors(w=torch.tensor([1.0, 2.0], dtype=kind), n=torch.tensor([1]))
    mean = Mean()
    mean.add(t, 2.0)
    mean.add(Tensors(w=torch.tensor([3.0, 3.0], dtype=kind), n=torch.tensor([7])), 2.0)
    mean.value()["n"].add_(5)
    assert t["w"].tolist() == [1, 2]
    assert t["n"].tolist() == [1]
    assert mean.value()["n"].tolist() == [7]


def test_mean_keeps_its_precision_over_many_items() -> None:
    """Ten thousand times 0.1 in single precision would drift in the fourth digit; the running sum is double."""
    mean = weighted_mean((Tensors(w=torch.tensor(0.1)), 1.0) for _ in range(10_000))
    assert mean["w"] == torch.tensor(0.1)


def flat_and_not(seed: int) -> tuple[Tensors, Tensors]:
    """The same random tensors as views of one vector, and apart."""
    apart = Tensors(a=torch.randn(3, 5, generator=seeded(seed)), b=torch.randn(7, generator=seeded(seed + 1)))
    return Tensors.views(torch.cat([t.reshape(-1) for t in apart.values()]), apart), apart


@pytest.mark.parametrize(
    "rule", [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * 0.3, lambda x, y: x / 7, lambda x, y: x.zeros()]
)
def test_arithmetic_of_views_of_one_vector_is_bit_identical(rule: Callable[[Tensors, Tensors], Tensors]) -> None:
    (x, apart_x), (y, apart_y) = flat_and_not(0), flat_and_not(2)
    at_once, apart = rule(x, y), rule(apart_x, apart_y)
    assert at_once.flat is not None
    assert list(at_once) == list(apart)
    for mixed in (at_once, rule(x, apart_y), rule(apart_x, y)):
        assert all(torch.equal(mixed[name], apart[name]) for name in apart)


def test_vectors_in_another_order_or_shape_are_not_mixed_up() -> None:
    x, _ = flat_and_not(0)
    turned = Tensors.views(x.flat.clone(), {"b": x["b"], "a": x["a"]})
    assert torch.equal((x + turned)["b"], x["b"] + turned["b"])
    other = Tensors.views(torch.arange(22.0), {"a": torch.empty(1, 5), "b": torch.empty(17)})
    with pytest.raises(RuntimeError):
        x + other


@pytest.mark.parametrize("weight", [12.0, 1.0, 0.3])
def test_the_mean_of_views_of_one_vector_is_bit_identical(weight: float) -> None:
    pairs = [flat_and_not(seed) for seed in range(0, 8, 2)]
    at_once, apart = (weighted_mean((pair[i], weight + k) for k, pair in enumerate(pairs)) for i in (0, 1))
    assert all(torch.equal(at_once[name], apart[name]) for name in apart)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.__setitem__("a", torch.ones(15)),
        lambda x: x.pop("a"),
        lambda x: x.update(a=torch.ones(15)),
        lambda x: x.__delitem__("a"),
        lambda x: x.popitem(),
        lambda x: x.clear(),
        lambda x: x.setdefault("c", torch.ones(2)),
        lambda x: x.__ior__({"a": torch.ones(15)}),
    ],
)
def test_a_changed_entry_does_not_leave_the_old_vector_behind(change: Callable[[Tensors], object]) -> None:
    """Otherwise arithmetic would silently use the values from before."""
    x, _ = flat_and_not(0)
    change(x)
    assert x.flat is None


def test_an_overlay_stays_one_vector_only_if_it_replaces_all_entries_in_their_order() -> None:
    like = {"a": torch.empty(2), "b": torch.empty(3)}
    x, y = Tensors.views(torch.zeros(5), like), Tensors.views(torch.arange(5.0), like)
    whole = x | y
    assert whole.flat is y.flat
    assert whole["b"].tolist() == [2, 3, 4]
    turned = Tensors.views(torch.arange(5.0), {"b": torch.empty(3), "a": torch.empty(2)})
    assert (x | turned).flat is None  # its entries lie in another order
    assert (x | dict(y)).flat is None
    assert (x | y.like(["a"])).flat is None


@pytest.mark.parametrize(
    "look",
    [
        list, len, dict, sorted, repr, reversed, copy.copy, copy.deepcopy,
        lambda x: {**x}, lambda x: {} | x, lambda x: "b" in x, lambda x: x.get("b"), lambda x: x["b"],
        lambda x: list(x.items()), lambda x: list(x.values()), lambda x: x.copy(), lambda x: bool(x),
        lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.keys() & {"a"}, lambda x: x.like(["b"]),
    ],
)  # fmt: skip
def test_views_that_have_not_been_made_yet_are_seen_by_every_way_of_looking(look: Callable[[Tensors], Any]) -> None:
    like = {"a": torch.empty(1), "b": torch.empty(1, 1)}
    views = Tensors.views(torch.tensor([1.0, 2.0]), like)
    apart = Tensors(a=torch.tensor([1.0]), b=torch.tensor([[2.0]]))
    seen, expected = look(views), look(apart)
    if isinstance(expected, type(reversed({}))):
        seen, expected = list(seen), list(expected)
    assert str(seen) == str(expected)


def test_equal_vectors_are_equal_tensors() -> None:
    like = {"a": torch.empty(())}
    x, y = Tensors.views(torch.ones(1), like), Tensors.views(torch.zeros(1), like)
    assert x == {"a": torch.ones(())}
    assert x != y
