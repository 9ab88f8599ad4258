"""Loss terms that several methods share, on numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from fedskew.core.losses import alignment, decoupled, imitation, supervised_contrast

Z = tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]])  # normalised: (1, 0), (0, 1), (0, 1)


@pytest.mark.parametrize("y", [0, 1, 2])
def test_the_two_parts_of_decoupled_distillation_make_up_the_divergence(y: int) -> None:
    """KD = TCKD + (1 - p_target) NCKD, whichever class is the target."""
    student, teacher = tensor([[0.3, 0.1, 0.9]]), tensor([[1.0, -0.4, 1.2]])
    target, others = decoupled(student, teacher, tensor([y]))
    p = teacher.softmax(1)[0, y]
    assert float(target + (1 - p) * others) == pytest.approx(float(imitation(student, teacher)), abs=1e-6)


def test_contrast_is_the_mean_over_samples_of_the_mean_over_their_class() -> None:
    """Samples 1 and 2 are of one class: each has itself left out and log softmax(1, 0)[0] = -log(1 + 1/e).

    Sample 0 is alone in its class and counts as 0 of three.
    """
    wanted = 2 * math.log(1 + math.exp(-1)) / 3
    assert float(supervised_contrast(Z, tensor([0, 1, 1]), 1.0)) == pytest.approx(wanted)
    assert float(supervised_contrast(Z, tensor([0, 1, 2]), 1.0)) == 0


def test_contrast_within_one_class_averages_over_the_others() -> None:
    """All of one class: sample 0 sees (0, 0), 1 and 2 see (0, 1) in some order; means over two others each."""
    first = math.log(2)
    second = math.log(1 + math.e) - 0.5
    assert float(supervised_contrast(Z, tensor([0, 0, 0]), 1.0)) == pytest.approx((first + 2 * second) / 3)


def test_alignment_moves_virtual_features_by_their_own_contrast_only() -> None:
    z, y = Z.clone(), tensor([0, 1, 1])
    z_v = tensor([[1.0, 0.5], [0.2, 1.0], [1.0, 1.0]], requires_grad=True)
    y_v = tensor([0, 1, 1])
    (got,) = torch.autograd.grad(alignment(z, y, z_v, y_v, 0.5), z_v)
    (own,) = torch.autograd.grad(0.1 * supervised_contrast(z_v, y_v, 0.5), z_v)
    assert torch.allclose(got, own)
