"""Ditto on Toy Q (see toys.py): x is FedAvg's; v_i is pulled towards x as it was when the round began."""

import pytest

from fedskew.core.seeding import one_thread
from fedskew.core.training import Training
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.methods.ditto import Ditto
from fedskew.methods.fedavg import FedAvg
from toys import digits, rounds, same, toy_q, w_of


def v(simulation: Simulation, client: int) -> float:
    return float(decode(simulation.store.get(client))["personal"]["w"])


def test_two_rounds_by_hand() -> None:
    """lambda 1, round 1 around 0: v_1 = .1 + .1(.9 - .1) = .18, v_2 = -.3 - .1(2.1 - .3) = -.48.

    Round 2 around -.335: v_1 = .18 + .1(.82 - .515) = .2105 -> .2105 + .1(.7895 - .5455) = .2349.
    """
    records, simulation = rounds(toy_q(Ditto(lam=1.0)), 1)
    assert [v(simulation, i) for i in (0, 1)] == pytest.approx([0.18, -0.48], abs=1e-12)
    records, simulation = rounds(toy_q(Ditto(lam=1.0)), 2)
    assert [v(simulation, i) for i in (0, 1)] == pytest.approx([0.2349, -0.7064], abs=1e-12)
    assert [w_of(r) for r in records] == pytest.approx([-0.335, -0.52595], abs=1e-12)


def test_a_late_client_starts_from_the_common_initial_model() -> None:
    """Client 2 made x = -.51. Client 1 starts at 0: .1(1 - .51) = .049 -> .049 + .1(.951 - .559) = .0882."""
    _, simulation = rounds(toy_q(Ditto(lam=1.0)), 2, cohorts=[[1], [0]])
    assert v(simulation, 0) == pytest.approx(0.0882, abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_its_global_branch_is_fedavg_bit_for_bit(lam: float) -> None:
    training = Training(lr=0.05, batch_size=16, momentum=0.9)
    a, _ = rounds(digits(Ditto(lam=lam), training=training), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    b, _ = rounds(digits(FedAvg(), training=training), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    assert same(a[-1].server, b[-1].server)


def test_both_branches_see_the_same_batches() -> None:
    """Without the pull, and from the same start, both do the same."""
    world = digits(Ditto(lam=0.0))
    server = world.method.init_server(world.server_site(0, "init"))
    with one_thread():
        done = world.train_client(2, 0, "train", server, {})
    assert same({"w": done.state["personal"]}, {"w": done.update.payload["parameters"]})
    assert done.update.metrics["personal_loss"] == done.update.metrics["loss"]


def test_without_the_pull_the_personal_model_trains_alone() -> None:
    """Four steps: w - 1 shrinks by .9 each, w + 1 by .7."""
    _, simulation = rounds(toy_q(Ditto(lam=0.0)), 2)
    assert [v(simulation, i) for i in (0, 1)] == pytest.approx([1 - 0.9**4, 0.7**4 - 1], abs=1e-12)


def test_a_strong_pull_keeps_the_personal_model_near_the_servers() -> None:
    def apart(lam: float) -> float:
        _, simulation = rounds(digits(Ditto(lam=lam)), 2)
        moved = decode(simulation.store.get(0))["personal"] - decode(simulation.store.get(1))["personal"]
        return float(moved.dot(moved))

    assert apart(5.0) < apart(0.5) < apart(0.0)


def test_a_client_deploys_its_own_model_or_before_its_first_round_the_servers() -> None:
    world = toy_q(Ditto(lam=1.0))
    records, simulation = rounds(world, 1, cohorts=[[0]])
    site, state = world.site(0, 1, "evaluate"), decode(simulation.store.get(0))
    assert float(world.method.personalise(site, records[0].server, state)["parameters"]["w"]) == pytest.approx(0.18)
    assert float(world.method.personalise(site, records[0].server, {})["parameters"]["w"]) == pytest.approx(0.19)
