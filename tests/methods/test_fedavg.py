"""FedAvg on Toy Q: f_1 = 1/2 (w-1)^2, f_2 = 3/2 (w+1)^2, p = (1/4, 3/4), lr 0.1, two full steps from 0."""

import pytest

from fedskew.methods.fedavg import FedAvg
from toys import rounds, toy_q, w_of


def test_two_rounds_by_hand() -> None:
    """Client 1: 0 -> .1 -> .19. Client 2: 0 -> -.3 -> -.51. Mean .25 * .19 + .75 * -.51 = -.335; then -.52595."""
    records, _ = rounds(toy_q(FedAvg()), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.335, -0.52595], abs=1e-12)


def test_weights_are_shares_of_the_cohort_not_of_all_clients() -> None:
    """Only client 1 takes part: the model is its own, .19, not a quarter of it."""
    records, _ = rounds(toy_q(FedAvg()), 1, cohorts=[[0]])
    assert w_of(records[0]) == pytest.approx(0.19, abs=1e-12)


def test_a_single_client_is_plain_training() -> None:
    """Client 2 alone for two rounds of two steps: w+1 shrinks by .7 a step, so w = .7^4 - 1."""
    records, _ = rounds(toy_q(FedAvg()), 2, cohorts=[[1], [1]])
    assert w_of(records[1]) == pytest.approx(0.7**4 - 1, abs=1e-12)


def test_uniform_weighting_counts_clients_not_samples() -> None:
    """(.19 - .51) / 2 = -.16; from there client 1 comes to 1 - 1.16 * .81 and client 2 to .84 * .49 - 1."""
    records, _ = rounds(toy_q(FedAvg(weighting="uniform")), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.16, (0.0604 - 0.5884) / 2], abs=1e-12)
