"""Areas of many clients, computed in one go, are those of each alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.evaluation.areas import part_aurocs
from fedskew.evaluation.bins import Predictions, place
from fedskew.evaluation.counts import Counts, set_areas


def drawn(seed: int, n: int, classes: int, levels: int) -> Predictions:
    """Predictions of which many are tied: logits have few levels."""
    rng = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=rng) ** 2 * classes).long()
    logits = torch.randint(levels, (n, classes), generator=rng).float() + torch.nn.functional.one_hot(y, classes)
    return Predictions(logits.log_softmax(1), y, logits.argmax(1))


def parts_of(made: Predictions, sizes: list[int]) -> list[Predictions]:
    return [Predictions(*part) for part in zip(*(t.split(sizes) for t in made), strict=True)]


@pytest.mark.parametrize("sizes", [[3, 4, 2, 4], [1, 90, 2, 17, 1, 33], [40]])
@pytest.mark.parametrize(("classes", "levels"), [(2, 2), (3, 50), (12, 3)])
def test_the_areas_of_parts_are_those_of_each_alone_bit_for_bit(sizes: list[int], classes: int, levels: int) -> None:
    """Parts of about one size and of very different ones, with and without ties, more and fewer than eight classes."""
    made = drawn(sum(sizes) + classes, sum(sizes), classes, levels)
    alone = parts_of(made, sizes)
    total = np.stack([np.bincount(part.y, minlength=classes) for part in alone])
    assert part_aurocs(place(made), total) == [Counts.of(part).auroc for part in alone]


def test_bins_of_few_scores_are_those_of_many() -> None:
    """Bins do not depend on how many are looked for at once."""
    logits = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * 9
    y = torch.zeros(4000, dtype=torch.long)
    made = Predictions(logits.log_softmax(1), y, logits.argmax(1))
    apart = [place(part).keys for part in parts_of(made, [40] * 100)]
    assert np.array_equal(place(made).keys, np.concatenate(apart))


def test_the_area_of_a_part_is_worked_by_hand() -> None:
    """Scores of class 1: 0.1 and 0.4 (others), 0.4 and 0.9 (own): pairs right 1 + 1 + 1/2 + 1 of 4.

    A second part has samples of one class only: there is no area.
    """
    p = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.5])
    y = torch.tensor([0, 0, 1, 1, 0])
    made = Predictions(torch.stack([1 - p, p], 1).log(), y, (p > 0.5).long())
    assert part_aurocs(place(made), np.array([[2, 2], [1, 0]])) == [3.5 / 4, None]


def test_of_two_classes_the_area_is_that_of_the_second_also_where_it_is_improbable() -> None:
    """Probabilities of class 1 about 1e-13 can be told apart; those of class 0 are all 1 in float32, hence tied."""
    rng = torch.Generator().manual_seed(0)
    y = (torch.rand(60, generator=rng) < 0.4).long()
    logits = torch.stack([torch.zeros(60), torch.randn(60, generator=rng) + 2 * y - 30], 1)
    made = Predictions(logits.log_softmax(1), y, logits.argmax(1))
    total = np.bincount(y, minlength=2)[None]
    (found,) = part_aurocs(place(made), total)
    assert found == Counts.of(made).auroc
    assert found is not None
    assert found > 0.8


def test_areas_of_several_models_in_one_go_are_those_of_each() -> None:
    models = [Counts.of(drawn(seed, 30 + seed, 4, 20)) for seed in range(3)]
    again = [Counts.of(drawn(seed, 30 + seed, 4, 20)) for seed in range(3)]
    set_areas(again)
    for one, other in zip(models, again, strict=True):
        assert np.array_equal(one.areas, other.areas, equal_nan=True)
    set_areas([])
