"""FedLC: the calibration of logits on numbers, and classes that a client lacks."""

from __future__ import annotations

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.methods.fedlc import FedLC, calibration
from toys import digits


def test_the_calibration_is_tau_over_the_fourth_root_of_the_count() -> None:
    """1, 16 and 81 samples have the fourth roots 1, 2 and 3."""
    labels = torch.repeat_interleave(torch.arange(3), tensor([1, 16, 81]))
    assert_close(calibration(labels, 4, 0.6), tensor([0.6, 0.3, 0.2, torch.inf]))


def test_the_loss_by_hand() -> None:
    """Logits 0 and 0 of classes with 1 and 16 samples, tau 1: softmax of (-1, -.5), for y = 0: log(1 + e^.5)."""
    method = FedLC(tau=1.0)
    site = digits(method).site(0, 0, "train")
    site.data = type(site.data)(torch.zeros(17, 1), tensor([0] + [1] * 16), torch.arange(17))
    site.classes = 2
    loss = method.objective(site, {}, {})(lambda x: torch.zeros(len(x), 2), torch.zeros(1, 1), tensor([0]))
    assert loss.item() == pytest.approx(0.974077, abs=1e-6)


def test_missing_classes_get_no_gradient_and_no_nan() -> None:
    method = FedLC()
    site = digits(method, split="pcdd:clients=5,classes=2").site(0, 0, "train")
    site.load()
    held = site.data.labels.unique()
    x, y = site.data.take(torch.arange(8))
    site.net.requires_grad_(True)
    method.objective(site, {}, {})(site.net, x, y).backward()
    rows = site.net.head.weight.grad.abs().sum(1)
    assert (rows[held] > 0).all()
    missing = [c for c in range(10) if c not in held]
    assert missing
    assert (rows[missing] == 0).all()
