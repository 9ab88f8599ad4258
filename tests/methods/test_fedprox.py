"""FedProx on Toy Q (see toys.py): each step's gradient gains mu (w - w_t)."""

import pytest
import torch

from fedskew.core.losses import proximal
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedprox import FedProx
from toys import digits, rounds, same, toy_q, w_of


@pytest.mark.parametrize(("mu", "w"), [(1.0, -0.315), (0.1, -0.333), (0.0, -0.335)])
def test_one_round_by_hand(mu: float, w: float) -> None:
    """mu 1: y_1 = .1 + .1(.9 - .1) = .18, y_2 = -.3 - .1(2.1 - .3) = -.48; mean .25 * .18 - .75 * .48 = -.315."""
    records, _ = rounds(toy_q(FedProx(mu=mu)), 1)
    assert w_of(records[0]) == pytest.approx(w, abs=1e-12)


def test_the_anchor_is_this_rounds_global_model() -> None:
    """Round 2 starts at -.315 and is pulled there, not to 0: y_1 = -.315 + .1(1.315) + .1(1.1835 - .1315) = -.0783;
    y_2 = -.315 - .1(2.055) - .1(1.4385 - .2055) = -.6438; mean -.502425."""
    records, _ = rounds(toy_q(FedProx(mu=1.0)), 2)
    assert w_of(records[1]) == pytest.approx(-0.502425, abs=1e-12)


def test_the_term_is_half_mu_of_the_squared_distance() -> None:
    """|(1, 2) - (0, 4)|^2 + |3 - 1|^2 = 1 + 4 + 4."""
    w = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    assert proximal(w.items(), {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor(1.0)}) == 9.0


def test_a_large_mu_keeps_clients_near_the_global_model() -> None:
    def drift(mu: float) -> float:
        records, _ = rounds(digits(FedProx(mu=mu)), 1)
        start = digits(FedAvg()).initial["parameters"]
        moved = records[0].server["parameters"] - start
        return float(moved.dot(moved))

    assert drift(5.0) < drift(0.5) < drift(0.0)


def test_without_its_term_it_is_fedavg_bit_for_bit() -> None:
    a, _ = rounds(digits(FedProx(mu=0.0)), 2)
    b, _ = rounds(digits(FedAvg()), 2)
    assert same(a[-1].server, b[-1].server)
