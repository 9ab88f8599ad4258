"""FedDC on Toy Q (see toys.py), alpha .1. Where clients count alike the optimum is -.5, by samples it is -.8."""

import pytest
import torch

from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.methods._shared.control_variates import relative_size
from fedskew.methods.feddc import FedDC
from toys import digits, rounds, toy_q, w_of

UNIFORM = FedDC(alpha=0.1, weighting="uniform")


def kept(simulation: Simulation, group: str) -> list[float]:
    return [float(decode(simulation.store.get(i))[group]["w"]) for i in (0, 1)]


def test_the_first_round_by_hand() -> None:
    """y = (.189, -.507) as FedDyn's, and so is h; g_i = -y/.2 = (-.945, 2.535), g = .795; x = mean(y) + mean(h)."""
    records, simulation = rounds(toy_q(UNIFORM), 1)
    assert w_of(records[0]) == pytest.approx(-0.318, abs=1e-12)
    assert w_of(records[0], "gradient") == pytest.approx(0.795, abs=1e-12)
    assert kept(simulation, "drift") == pytest.approx([0.189, -0.507], abs=1e-12)
    assert kept(simulation, "gradient") == pytest.approx([-0.945, 2.535], abs=1e-12)


def test_the_second_round_by_hand() -> None:
    """Client 1 is held to -.318 - .189 = -.507 and pushed by .795 + .945 = 1.74: -.318 -> -.318 - .1(-1.318 + .0189
    + 1.74) = -.36209 -> -.4013301; h_1 = .189 - .0833301, g_1 = -.945 - .795 + .0833301/.2."""
    records, simulation = rounds(toy_q(UNIFORM), 2)
    assert w_of(records[1]) == pytest.approx(-0.6034758, abs=1e-12)
    assert w_of(records[1], "gradient") == pytest.approx(0.3161895, abs=1e-12)
    assert kept(simulation, "drift") == pytest.approx([0.1056699, -0.5501457], abs=1e-12)
    assert kept(simulation, "gradient") == pytest.approx([-1.3233495, 1.9557285], abs=1e-12)


def test_a_cohort_moves_the_server_by_its_share_of_the_population() -> None:
    """Client 1 alone: x = .189 + .189/2 = .2835, g = -.945/2. The mean drift then keeps its part."""
    records, _ = rounds(toy_q(UNIFORM), 2, cohorts=[[0], [1]])
    assert [w_of(r) for r in records] == pytest.approx([0.2835, -0.478323], abs=1e-12)
    assert [w_of(r, "gradient") for r in records] == pytest.approx([-0.4725, 1.190955], abs=1e-12)


def test_under_momentum_two_steps_move_as_far_as_2_9_plain_ones() -> None:
    """Client 1, momentum .9: 0 -> .1 -> .1 + .1(.9 + .9 - .01) = .279; g_1 = -.279/.29."""
    world = toy_q(UNIFORM, training=Training(lr=0.1, steps=2, batch_size=4, momentum=0.9))
    _, simulation = rounds(world, 1)
    assert kept(simulation, "gradient")[0] == pytest.approx(-0.279 / 0.29, abs=1e-12)


def test_the_rate_in_the_gradient_is_that_of_the_round() -> None:
    """Halved in round 2, client 1: -.318 - .05 * .4409 = -.340045 -> -.340045 - .05(-1.340045 + .0166955 + 1.74)
    = -.360877525; g_1 = -1.74 + .042877525/.1."""
    training = Training(lr=0.1, steps=2, batch_size=4, schedule="exponential:rate=0.5")
    _, simulation = rounds(toy_q(UNIFORM, training=training), 2)
    assert kept(simulation, "gradient")[0] == pytest.approx(-1.31122475, abs=1e-12)


def test_it_ends_in_the_optimum() -> None:
    """There no client moves: mean drift and g are 0."""
    records, _ = rounds(toy_q(UNIFORM), 200)
    assert w_of(records[-1]) == pytest.approx(-0.5, abs=1e-7)
    assert w_of(records[-1], "drift") == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("cohorts", [[range(5)] * 3, [[0, 1], [1, 3], [0, 3]]])
def test_the_server_has_the_means_over_all_clients_in_the_cohort_or_not(cohorts: list[list[int]]) -> None:
    records, simulation = rounds(digits(UNIFORM), 3, cohorts=cohorts)
    own = [decode(simulation.store.get(i)) for i in range(5) if i in simulation.store]
    for group in ("drift", "gradient"):
        for name, mean in records[-1].server[group].items():
            torch.testing.assert_close(mean, sum(s[group][name] for s in own) / 5, rtol=1e-4, atol=1e-6)


def test_one_gradient_is_sent_each_way_and_the_drift_is_not_sent() -> None:
    records, simulation = rounds(digits(UNIFORM), 1)
    assert records[0].bytes_up.keys() == records[0].bytes_down.keys() == {"parameters", "buffers", "gradient"}
    assert decode(simulation.store.get(0)).keys() == {"drift", "gradient"}


def test_by_samples_the_second_round_by_hand() -> None:
    """The clients have 1 and 3 samples, the mean is 2: w = (.5, 1.5) from the second round on. Client 1 is held to
    -.507 by alpha / w = .2 and pushed by .795 / .5 + .945 = 2.535: -.318 -> -.44348 -> -.5539024. Client 2 is
    held to .189 by .0667 and pushed by .795 / 1.5 - 2.535 = -2.005: -.318 -> -.31872 -> -.3192192. g_1 =
    -.945 - 1.59 + .2359024/.2, g_2 = 2.535 - .53 + .0012192/.2; g = mean of w_i g_i =
    (.5 * -1.355488 + 1.5 * 2.011096) / 2."""
    records, simulation = rounds(toy_q(FedDC(alpha=0.1)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.318, -0.7141216], abs=1e-10)
    assert kept(simulation, "drift") == pytest.approx([-0.0469024, -0.5082192], abs=1e-10)
    assert kept(simulation, "gradient") == pytest.approx([-1.355488, 2.011096], abs=1e-10)
    assert [w_of(r, "gradient") for r in records] == pytest.approx([0.795, 1.16945], abs=1e-10)


@pytest.mark.parametrize("cohorts", [None, [[i % 2] for i in range(400)]], ids=["all", "one-at-a-time"])
def test_by_samples_it_ends_in_the_optimum_over_all_samples(cohorts: list[list[int]] | None) -> None:
    """1 (w - 1) + 3 * 3 (w + 1) = 0 at -.8."""
    records, _ = rounds(toy_q(FedDC(alpha=0.1)), 400, cohorts)
    assert w_of(records[-1]) == pytest.approx(-0.8, abs=1e-7 if cohorts is None else 1e-3)


def test_by_samples_the_server_has_the_mean_of_all_weighted_gradients() -> None:
    """Also of clients whose w_i has changed since: the mean number of samples is known from the second round on."""
    records, simulation = rounds(digits(FedDC()), 3, cohorts=[[0, 1], [1, 3], [0, 3]])
    own = [decode(simulation.store.get(i)) for i in (0, 1, 3)]
    for name, g in records[-1].server["gradient"].items():
        total = sum(s["gradient"][name] * float(s["weight"]["w_i"]) for s in own)
        torch.testing.assert_close(g, total / 5, rtol=1e-4, atol=1e-6)


def test_a_client_with_very_few_samples_is_not_thrown_about_by_its_own_pull() -> None:
    """3 samples beside 3,000: w = .002, alpha / w = 50 and lr alpha / w = 5, and each step goes too far."""
    world = toy_q(FedDC(alpha=0.1))
    mean = Tensors(total=torch.tensor(3003.0), updates=torch.tensor(2.0))
    site = world.site(1, 1, "train")
    assert relative_size(site, {"samples": mean}, 0.1) == pytest.approx(0.1 * 0.1)
    assert relative_size(site, {"samples": mean}, 1e-9) == pytest.approx(6 / 3003)
