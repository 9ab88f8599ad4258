"""FedNova on Toy Q (see toys.py). Batches of 2 and two epochs: client 1 takes 2 steps, client 2 takes 4."""

import pytest
import torch

from fedskew.core.method import Method
from fedskew.core.training import Training
from fedskew.federation.protocol import Record
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fednova import FedNova
from fedskew.methods.fedprox import FedProx
from toys import digits, rounds, toy_q, w_of


def one_round(method: Method, momentum: float = 0.0) -> Record:
    training = Training(lr=0.1, epochs=2, batch_size=2, momentum=momentum)
    return rounds(toy_q(method, training=training), 1)[0][0]


def test_unequal_steps_by_hand() -> None:
    """y = (.19, .7^4 - 1 = -.7599), a = (2, 4), tau_eff = .25 * 2 + .75 * 4 = 3.5, d = (-.095, .189975):
    x = -3.5(.25 * -.095 + .75 * .189975), while FedAvg has .25 * .19 - .75 * .7599 = -.522425."""
    assert w_of(one_round(FedNova())) == pytest.approx(-0.415559375, abs=1e-12)
    assert w_of(one_round(FedAvg())) == pytest.approx(-0.522425, abs=1e-12)


def test_unequal_steps_under_momentum() -> None:
    """Momentum .9: y = (.28, -1.6428), a = (2.9, 9.049), tau_eff = .25 * 2.9 + .75 * 9.049 = 7.51175."""
    assert w_of(one_round(FedNova(), 0.9)) == pytest.approx(-0.8414719479, abs=1e-9)
    assert w_of(one_round(FedAvg(), 0.9)) == pytest.approx(-1.1621, abs=1e-9)


def test_unequal_steps_with_a_proximal_term() -> None:
    """mu 1, lr mu = .1: a = (1 + .9, 1 + .9 + .81 + .729); tau_eff counts steps, 3.5. FedProx moves the clients alike:
    y_1 = .18 and y_2 = -.75(1 - .6^4) = -.6528, x = -3.5(-.25 * .18/1.9 + .75 * .6528/3.439)."""
    assert w_of(one_round(FedNova(mu=1.0))) == pytest.approx(-0.4153896482, abs=1e-9)
    assert w_of(one_round(FedProx(mu=1.0))) == pytest.approx(0.25 * 0.18 - 0.75 * 0.6528, abs=1e-12)


def test_weights_are_of_the_cohort() -> None:
    """A cohort of one moves to where its client went."""
    training = Training(lr=0.1, epochs=2, batch_size=2)
    records, _ = rounds(toy_q(FedNova(), training=training), 2, cohorts=[[0], [1]])
    assert [w_of(r) for r in records] == pytest.approx([0.19, 1.19 * 0.7**4 - 1], abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(momentum: float) -> None:
    training = Training(lr=0.05, steps=4, batch_size=16, momentum=momentum)
    a, _ = rounds(digits(FedNova(), training=training), 3)
    b, _ = rounds(digits(FedAvg(), training=training), 3)
    for name, w in b[-1].server["parameters"].items():
        torch.testing.assert_close(a[-1].server["parameters"][name], w, rtol=1e-4, atol=1e-6)


def test_with_unequal_steps_it_is_not() -> None:
    training = Training(lr=0.05, epochs=1, batch_size=8)
    a, _ = rounds(digits(FedNova(), training=training), 1)
    b, _ = rounds(digits(FedAvg(), training=training), 1)
    moved = [r[0].server["parameters"] - digits(FedAvg()).initial["parameters"] for r in (a, b)]
    assert float((moved[0] - moved[1]).dot(moved[0] - moved[1])) > 1e-3 * float(moved[1].dot(moved[1]))


def test_clients_that_take_no_step_leave_the_model_where_it_is() -> None:
    records, _ = rounds(toy_q(FedNova(), training=Training(steps=0), start=0.5), 1)
    assert w_of(records[0]) == 0.5


def test_one_number_goes_up_beside_the_direction() -> None:
    records, _ = rounds(digits(FedNova()), 1)
    assert records[0].bytes_up["steps"] == 5 * 8
    assert records[0].bytes_up.keys() == {"buffers", "direction", "steps"}
