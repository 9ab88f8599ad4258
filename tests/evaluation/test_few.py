"""Few predictions counted in one go have exactly the counts and figures of each model and client alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedskew.evaluation import few
from fedskew.evaluation import layout as layouts
from fedskew.evaluation.areas import Known, over_classes, over_classes_of_each
from fedskew.evaluation.bins import Predictions
from fedskew.evaluation.counts import Counts

AWKWARD = ("usual", "tied", "one class", "a class is missing", "not numbers", "certain")


@pytest.fixture(autouse=True)
def fresh_layouts() -> Iterator[None]:
    layouts.layout.cache_clear()
    yield
    layouts.layout.cache_clear()


def drawn(n: int, classes: int, kind: str, seed: int = 0) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=rng) ** 2 * classes).long()
    if kind == "one class":
        y[:] = classes - 1
    if kind == "a class is missing":
        y[y == classes - 1] = 0
    logits = torch.randn(n, classes, generator=rng) + torch.nn.functional.one_hot(y, classes)
    logits = logits.round() if kind == "tied" else logits * 60 if kind == "certain" else logits
    if kind == "not numbers":
        logits[::3], logits[1::5, 0] = float("nan"), float("inf")
    return Predictions(logits.log_softmax(1), y, logits.argmax(1))


def split(made: Predictions, sizes: list[int]) -> list[Predictions]:
    return [Predictions(*part) for part in zip(*(t.split(sizes) for t in made), strict=True)]


def check(made: Predictions, models: list[int], parts: list[int]) -> None:
    """What is counted in one go is what is counted of each model and part alone."""
    classes = made.log_p.shape[1]
    found = few.count_few(split(made, models), models, parts)
    for one, expected in zip(found.models, map(Counts.of, split(made, models)), strict=True):
        assert one == expected
        assert np.array_equal(one.areas, expected.areas, equal_nan=True)
        assert np.array_equal(one.confusion, expected.confusion)
        for name in ("auroc", "auprc", "ece", "by_class", "samples"):
            assert getattr(one, name) == getattr(expected, name), name
    clients = split(made, [len(made.y) - sum(parts), *parts])[1:]
    assert found.aurocs == [Counts.of(part).auroc for part in clients]
    tables = (lambda p: p.y[p.y == p.predicted]), (lambda p: p.y), (lambda p: p.predicted)
    for table, chosen in zip(found[2:], tables, strict=True):
        assert table.tolist() == [np.bincount(chosen(part), minlength=classes).tolist() for part in clients]


@pytest.mark.parametrize("pairs", [layouts.PAIRS, 0])  # clients' areas from pairs of samples, and from sorting them
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("classes", [1, 2, 3, 12, 22, 100])  # the scores of more than 21 do not fit into 16 bits
def test_counts_in_one_go_are_those_of_each(
    classes: int, kind: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models; the last two are also parts, of which one has one sample and one has none."""
    monkeypatch.setattr(layouts, "PAIRS", pairs)
    check(drawn(69, classes, kind), [9, 49, 11], [40, 0, 1, 8, 11])


@pytest.mark.parametrize(
    ("models", "parts"), [([1], [1]), ([1], []), ([6], []), ([5, 0, 7], [7]), ([30] * 5, [15] * 6)]
)
def test_counts_of_hardly_any_samples_are_those_of_each(models: list[int], parts: list[int]) -> None:
    """One sample in all, no parts, a model without samples, and more models than 16 bits have places for."""
    for classes in (2, 10):
        check(drawn(sum(models), classes, "usual"), models, parts)


def test_what_is_kept_of_one_evaluation_is_not_used_for_other_labels() -> None:
    """The same sizes twice, of other samples; and the same again with another model, for which it is used."""
    check(drawn(30, 3, "usual", seed=1), [12, 18], [9, 9])
    check(drawn(30, 3, "usual", seed=2), [12, 18], [9, 9])
    assert layouts.layout.cache_info().misses == 2
    again = drawn(30, 3, "usual", seed=2)
    turned = again.log_p.flip(1)
    check(Predictions(turned, again.y, turned.argmax(1)), [12, 18], [9, 9])
    assert layouts.layout.cache_info().misses == 2


@pytest.mark.parametrize("classes", [2, 7, 12, 40])
def test_means_over_classes_in_one_go_are_those_of_each_row(classes: int) -> None:
    """Rows with all values known, with some, with one and with none."""
    rng = np.random.default_rng(0)
    values = rng.random((60, classes))
    values[rng.random(values.shape) < np.linspace(0, 1, 60)[:, None]] = np.nan
    expected = [over_classes(row) for row in values]
    assert over_classes_of_each(values) == expected
    assert over_classes_of_each(values, Known.of(~np.isnan(values))) == expected
