"""FedRS: the factors of the logits, against the authors' formula, and the gradient of missing classes."""

from __future__ import annotations

import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.methods.fedrs import FedRS, restriction
from toys import digits

LABELS = tensor([0, 0, 0, 0, 2, 2, 3])  # 4, 0, 2, 1 samples of four classes


def test_missing_classes_have_the_factor_alpha() -> None:
    assert_close(restriction(LABELS, 4, 0.5, "missing"), tensor([1.0, 0.5, 1.0, 1.0]))


def test_graded_factors_are_those_of_the_authors_code() -> None:
    """n / max n = (1, 0, .5, .25), times 1 - alpha plus alpha, with alpha = .5."""
    assert_close(restriction(LABELS, 4, 0.5, "graded"), tensor([1.0, 0.5, 0.75, 0.625]))


def test_the_loss_is_cross_entropy_of_the_scaled_logits() -> None:
    """Of logits (1, 2) with factors (1, .5) and y = 0: softmax of (1, 1), log 2; the gradient of f_1 is .5 * .5."""
    method = FedRS(alpha=0.5)
    site = digits(method).site(0, 0, "train")
    site.data, site.classes = type(site.data)(torch.zeros(2, 1), tensor([0, 0]), torch.arange(2)), 2
    logits = tensor([[1.0, 2.0]], requires_grad=True)
    loss = method.objective(site, {}, {})(lambda x: logits, torch.zeros(1, 1), tensor([0]))
    assert_close(loss, tensor(2.0).log())
    loss.backward()
    assert_close(logits.grad, tensor([[-0.5, 0.25]]))
