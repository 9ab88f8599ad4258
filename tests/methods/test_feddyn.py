"""FedDyn on Toy Q (see toys.py), alpha .1. Where clients count alike the optimum is -.5, by samples it is -.8."""

import pytest
import torch

from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.methods.feddyn import FedDyn
from toys import digits, rounds, toy_q, w_of

UNIFORM = FedDyn(alpha=0.1, weighting="uniform")


def gradients(simulation: Simulation) -> list[float]:
    return [float(decode(simulation.store.get(i))["gradient"]["w"]) for i in (0, 1)]


def test_two_rounds_by_hand() -> None:
    """Round 1: y_1 = .1 - .1(-.9 + .1 * .1) = .189, y_2 = -.3 - .1(2.1 - .1 * .3) = -.507; g = -.1 y = (-.0189, .0507);
    h = -.1 * mean(y) = .0159, x = -.159 - .159 = -.318."""
    first, simulation = rounds(toy_q(UNIFORM), 1)
    assert gradients(simulation) == pytest.approx([-0.0189, 0.0507], abs=1e-12)
    records, simulation = rounds(toy_q(UNIFORM), 2)
    assert [w_of(r, "h") for r in records] == pytest.approx([0.0159, 0.02048379], abs=1e-12)
    assert [w_of(r) for r in records] == pytest.approx([-0.318, -0.5686758], abs=1e-12)
    y = [-0.0724701, -0.6552057]  # g <- g - .1 (y + .318)
    expected = [-0.0189 - 0.1 * (y[0] + 0.318), 0.0507 - 0.1 * (y[1] + 0.318)]
    assert gradients(simulation) == pytest.approx(expected, abs=1e-12)
    assert w_of(first[0]) == w_of(records[0])


def test_a_cohort_moves_h_by_its_share_of_the_population() -> None:
    """Client 1 alone: h = -.1/2 * .189 = -.00945, x = .189 + .0945 = .2835. Then client 2, with g_2 = 0, ends at
    -.3672345: h = -.00945 + .05 * .6507345 = .023086725, x = y_2 - .23086725."""
    records, simulation = rounds(toy_q(UNIFORM), 2, cohorts=[[0], [1]])
    assert [w_of(r, "h") for r in records] == pytest.approx([-0.00945, 0.023086725], abs=1e-12)
    assert [w_of(r) for r in records] == pytest.approx([0.2835, -0.59810175], abs=1e-12)
    assert gradients(simulation) == pytest.approx([-0.0189, 0.06507345], abs=1e-12)


def test_it_ends_in_the_optimum() -> None:
    """There y_i = x, so h = 0 and g_i is client i's own gradient: f_1'(-.5) = -1.5, f_2'(-.5) = 1.5."""
    records, simulation = rounds(toy_q(FedDyn(alpha=1.0, weighting="uniform")), 150)
    assert w_of(records[-1]) == pytest.approx(-0.5, abs=1e-7)
    assert gradients(simulation) == pytest.approx([-1.5, 1.5], abs=1e-6)


def test_h_is_the_mean_over_all_clients_gradients_in_the_cohort_or_not() -> None:
    records, simulation = rounds(digits(UNIFORM), 3, cohorts=[[0, 1], [1, 3], [0, 3]])
    own = [decode(simulation.store.get(i))["gradient"] for i in (0, 1, 3)]
    for name, h in records[-1].server["h"].items():
        torch.testing.assert_close(h, sum(g_i[name] for g_i in own) / 5, rtol=1e-4, atol=1e-7)


def test_nothing_but_the_model_and_two_counts_are_sent() -> None:
    records, simulation = rounds(digits(FedDyn()), 1)
    assert records[0].bytes_up.keys() == {"parameters", "buffers"}
    assert records[0].bytes_down.keys() == {"parameters", "buffers", "samples"}
    assert records[0].bytes_down["samples"] == 5 * 16
    assert rounds(digits(UNIFORM), 1)[0][0].bytes_down.keys() == {"parameters", "buffers"}
    assert decode(simulation.store.get(0)).keys() == {"gradient"}


def test_by_samples_the_second_round_by_hand() -> None:
    """The clients have 1 and 3 samples, the mean is 2: w = (.5, 1.5) from the second round on. alpha / w = (.2, .0667),
    g / w = (-.0378, .0338). Client 1: -.318 - .1(-1.318 + .0378) = -.18998 -> -.18998 -
    .1(-1.18998 + .0378 + .2 * .12802) = -.0773224.
    Client 2: -.318 - .1(2.046 - .0338) = -.51922 -> -.658732533. h = .0159 + .1 * .0500274667."""
    records, simulation = rounds(toy_q(FedDyn(alpha=0.1)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.318, -0.57705493333], abs=1e-10)
    assert [w_of(r, "h") for r in records] == pytest.approx([0.0159, 0.02090274667], abs=1e-10)
    y = [-0.0773224, -0.65873253333]
    expected = [-0.0189 - 0.1 * (y[0] + 0.318), 0.0507 - 0.1 * (y[1] + 0.318)]
    assert gradients(simulation) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("cohorts", [None, [[i % 2] for i in range(400)]], ids=["all", "one-at-a-time"])
def test_by_samples_it_ends_in_the_optimum_over_all_samples(cohorts: list[list[int]] | None) -> None:
    """1 (w - 1) + 3 * 3 (w + 1) = 0 at -.8."""
    records, _ = rounds(toy_q(FedDyn(alpha=1.0)), 400, cohorts)
    assert w_of(records[-1]) == pytest.approx(-0.8, abs=1e-7 if cohorts is None else 1e-3)
