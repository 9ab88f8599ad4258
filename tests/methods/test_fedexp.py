"""FedExP on Toy Q (see toys.py): D_1 = .19 and D_2 = -.51 disagree, so the server goes further than their mean."""

from __future__ import annotations

import pytest

from fedskew.core.method import model_of
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedexp import ITERATE, FedExP
from toys import digits, rounds, same, toy_q, w_of

SQUARES = 0.25 * 0.19**2 + 0.75 * 0.51**2  # .2041, the mean of |D_i|^2


def test_the_first_step_by_hand() -> None:
    """|D|^2 = .335^2 = .112225: eta = .2041 / (2 (.112225 + .0001)) = .9085 < 1, so the step is FedAvg's."""
    records, _ = rounds(toy_q(FedExP(epsilon=0.0001)), 1)
    assert w_of(records[0]) == pytest.approx(-0.335, abs=1e-12)


def test_the_more_the_clients_disagree_the_longer_the_step() -> None:
    """From w = -.4 client 1 moves by .19 * 1.4 = .266, client 2 by -.51 * .6 = -.306: D = -.163, D^2 = .026569, mean
    square .25 * .070756 + .75 * .093636 = .087916; eta = .087916 / (2 (.026569 + .001)) = 1.594472."""
    records, _ = rounds(toy_q(FedExP(epsilon=0.001), start=-0.4), 1)
    eta = 0.087916 / (2 * (0.163**2 + 0.001))
    assert eta > 1
    assert w_of(records[0], ITERATE) == pytest.approx(-0.4 + eta * -0.163, abs=1e-9)


def test_the_mean_of_the_last_two_is_deployed_and_the_last_is_trained_from() -> None:
    """The step of the test above: the model is half of it from -.4. The next round starts from all of it."""
    records, _ = rounds(toy_q(FedExP(epsilon=0.001), start=-0.4), 2)
    first, second = (w_of(record, ITERATE) for record in records)
    assert w_of(records[0]) == pytest.approx((-0.4 + first) / 2, abs=1e-9)
    again, _ = rounds(toy_q(FedExP(epsilon=0.001), start=first), 1)
    assert w_of(again[0], ITERATE) == pytest.approx(second, abs=1e-9)
    assert w_of(records[1]) == pytest.approx((first + second) / 2, abs=1e-9)


def test_a_large_epsilon_gives_fedavg_bit_for_bit() -> None:
    ours, _ = rounds(digits(FedExP(epsilon=1e9)), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert same(model_of(ours[-1].server), model_of(plain[-1].server))


def test_a_client_sends_one_number_more() -> None:
    records, _ = rounds(digits(FedExP()), 1, cohorts=[[0]])
    assert records[0].bytes_up["drift"] == 8
    assert records[0].bytes_down.keys() == {"parameters", "buffers", "iterate"}
