"""FedAdam, FedYogi and FedAdagrad on Toy Q (see toys.py), where FedAvg's first step is D = -.335."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedskew.methods.fedadagrad import FedAdagrad
from fedskew.methods.fedadam import FedAdam
from fedskew.methods.fedyogi import FedYogi
from helpers.nets import normed
from toys import digits, rounds, toy_q, w_of

D = -0.335
SETTINGS = {"server_lr": 0.1, "tau": 0.5}


@pytest.mark.parametrize(
    ("method", "m", "v"),
    [
        (FedAdam(**SETTINGS), 0.1 * D, 0.99 * 0.25 + 0.01 * D**2),
        (FedYogi(**SETTINGS), 0.1 * D, 0.25 - 0.01 * D**2),  # v = .25 is above D^2 = .112225
        (FedYogi(server_lr=0.1, tau=0.1), 0.1 * D, 0.01 + 0.01 * D**2),  # v = .01 is below it
        (FedAdagrad(**SETTINGS), D, 0.25 + D**2),
        (FedAdagrad(server_lr=0.1, tau=0.5, beta1=0.9), 0.1 * D, 0.25 + D**2),
    ],
)
def test_the_first_step_by_hand(method: Any, m: float, v: float) -> None:
    """m = (1 - beta1) D, v from tau^2, x = 0 + .1 m / (sqrt(v) + tau)."""
    records, _ = rounds(toy_q(method), 1)
    assert w_of(records[0], "moment") == pytest.approx(m, abs=1e-12)
    assert w_of(records[0], "second_moment") == pytest.approx(v, abs=1e-12)
    assert w_of(records[0]) == pytest.approx(0.1 * m / (v**0.5 + method.tau), abs=1e-12)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_moments_are_carried_over_rounds(kind: Any) -> None:
    """Without the first moment's history the second step would be (1 - beta1) of its D alone."""
    records, _ = rounds(toy_q(kind(**SETTINGS)), 2)
    x = w_of(records[0])
    y = 0.25 * (x + 0.19 * (1 - x)) + 0.75 * (x - 0.51 * (x + 1))  # two steps of each client, averaged
    assert w_of(records[1], "moment") == pytest.approx(0.9 * 0.1 * D + 0.1 * (y - x), abs=1e-12)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi, FedAdagrad])
def test_the_moments_stay_on_the_server_and_buffers_are_averaged(kind: Any) -> None:
    records, _ = rounds(digits(kind()), 1)
    assert records[0].bytes_down.keys() == records[0].bytes_up.keys() == {"parameters", "buffers"}
    ours, _ = rounds(normed(kind()), 1)
    plain, _ = rounds(normed(FedAdam(server_lr=1e-9)), 1)
    for name, t in plain[0].server["buffers"].items():
        assert torch.equal(ours[0].server["buffers"][name], t)
