"""SCAFFOLD on Toy Q (see toys.py): f_1' = w - 1, f_2' = 3 (w + 1); clients count the same, so the optimum is -.5."""

from typing import Any

import pytest
import torch

from fedskew.core.losses import plain
from fedskew.core.seeding import one_thread
from fedskew.core.tensors import Tensors, weighted_mean
from fedskew.core.training import Training
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.scaffold import SCAFFOLD, gradient
from toys import digits, rounds, same, toy_q, w_of


def control(simulation: Simulation, client: int) -> float:
    return float(decode(simulation.store.get(client))["control"]["w"])


def test_two_rounds_by_hand() -> None:
    """Round 1 is FedAvg's, y = (.19, -.51): c_1 = (0 - .19)/.2 = -.95, c_2 = .51/.2 = 2.55, c = .8, x = -.16.

    Round 2, client 1 pushed by c - c_1 = 1.75: -.16 -> -.16 - .1(-1.16 + 1.75) = -.219 -> -.2721.
    """
    records, simulation = rounds(toy_q(SCAFFOLD()), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.16, -0.2815], abs=1e-12)
    assert [w_of(r, "control") for r in records] == pytest.approx([0.8, 0.6075], abs=1e-12)
    assert [control(simulation, i) for i in (0, 1)] == pytest.approx([-1.1895, 2.4045], abs=1e-12)


def test_a_cohort_moves_the_servers_control_by_its_share_of_the_population() -> None:
    """Client 1 alone: c_1 = -.95, and c only half of it, -.475. Then client 2, new, is pushed by c - 0 = -.475:
    .19 -> .19 - .1(3.57 - .475) = -.1195 -> -.33615; c_2 = 0 + .475 + .52615/.2 = 3.10575, c = -.475 + c_2/2."""
    records, simulation = rounds(toy_q(SCAFFOLD()), 2, cohorts=[[0], [1]])
    assert [w_of(r) for r in records] == pytest.approx([0.19, -0.33615], abs=1e-12)
    assert [w_of(r, "control") for r in records] == pytest.approx([-0.475, 1.077875], abs=1e-12)
    assert [control(simulation, i) for i in (0, 1)] == pytest.approx([-0.95, 3.10575], abs=1e-12)


@pytest.mark.parametrize(("division", "c_1"), [("momentum", -0.28 / 0.29), ("steps", -1.4)])
def test_under_momentum_two_steps_move_as_far_as_2_9_plain_ones(division: Any, c_1: float) -> None:
    """Momentum .9: 0 -> .1 -> .1 + .1(.9 + .9) = .28. Two steps along g = -1 would lead to .1(1 + 1.9) = .29."""
    world = toy_q(SCAFFOLD(division=division), training=Training(lr=0.1, steps=2, batch_size=4, momentum=0.9))
    records, simulation = rounds(world, 1, cohorts=[[0]])
    assert w_of(records[0]) == pytest.approx(0.28, abs=1e-12)
    assert control(simulation, 0) == pytest.approx(c_1, abs=1e-12)


def test_option_one_takes_the_gradient_at_the_servers_model() -> None:
    """Round 1: c = (f_1'(0) + f_2'(0))/2 = (-1 + 3)/2. Round 2 from -.16, client 1 pushed by 1 + 1: -.244, -.3196;
    client 2 by 1 - 3: -.212, -.2484; x = -.284, c = (-1.16 + 2.52)/2."""
    records, simulation = rounds(toy_q(SCAFFOLD(option="I")), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.16, -0.284], abs=1e-12)
    assert [w_of(r, "control") for r in records] == pytest.approx([1.0, 0.68], abs=1e-12)
    assert [control(simulation, i) for i in (0, 1)] == pytest.approx([-1.16, 2.52], abs=1e-12)


def test_the_rate_in_the_control_is_that_of_the_round() -> None:
    """Halved in round 2: client 1 goes -.16 -> -.1895 -> -.217525; its control is its mean gradient,
    (-1.16 - 1.1895)/2 = -1.17475."""
    training = Training(lr=0.1, steps=2, batch_size=4, schedule="exponential:rate=0.5")
    _, simulation = rounds(toy_q(SCAFFOLD(), training=training), 2)
    assert control(simulation, 0) == pytest.approx(-1.17475, abs=1e-12)


def test_the_servers_rate_scales_the_model_not_the_control() -> None:
    records, _ = rounds(toy_q(SCAFFOLD(server_lr=0.5)), 1)
    assert (w_of(records[0]), w_of(records[0], "control")) == pytest.approx((-0.08, 0.8), abs=1e-12)


def test_weighting_by_samples_holds_for_model_and_control() -> None:
    """x = .25 * .19 - .75 * .51 = -.335 and c = -.25 * .95 + .75 * 2.55 = 1.675."""
    records, _ = rounds(toy_q(SCAFFOLD(weighting="samples")), 1)
    assert (w_of(records[0]), w_of(records[0], "control")) == pytest.approx((-0.335, 1.675), abs=1e-12)


@pytest.mark.parametrize(
    ("method", "optimum"),
    [(SCAFFOLD(), -0.5), (SCAFFOLD(option="I"), -0.5), (SCAFFOLD(weighting="samples"), -0.8)],
)
def test_it_ends_in_the_optimum_of_its_weighting(method: SCAFFOLD, optimum: float) -> None:
    """(w - 1) + 3 (w + 1) = 0 at -.5, and with weights 1/4 and 3/4 at -.8. FedAvg stays beside it: its two steps
    shrink w - 1 by .81 and w + 1 by .49, so w = .25(1 - .81(1 - w)) + .75(.49(w + 1) - 1) = -.335/.43 = -.779."""
    records, _ = rounds(toy_q(method), 80)
    assert w_of(records[-1]) == pytest.approx(optimum, abs=1e-8)
    assert w_of(records[-1], "control") == pytest.approx(0, abs=1e-8)
    biased, _ = rounds(toy_q(FedAvg()), 80)
    assert w_of(biased[-1]) == pytest.approx(-0.335 / 0.43, abs=1e-8)


def test_the_servers_control_is_the_mean_of_the_clients() -> None:
    training = Training(lr=0.05, batch_size=16, momentum=0.9, weight_decay=1e-3)
    records, simulation = rounds(digits(SCAFFOLD(), training=training), 3)
    own = [decode(simulation.store.get(i))["control"] for i in range(5)]
    expected = weighted_mean((c_i, 1) for c_i in own)
    for name, c in records[-1].server["control"].items():
        torch.testing.assert_close(c, expected[name], rtol=1e-5, atol=1e-6)


def test_clients_outside_the_cohort_count_in_the_mean_with_their_old_control() -> None:
    records, simulation = rounds(digits(SCAFFOLD()), 3, cohorts=[[0, 1], [1, 3], [0, 3]])
    own = [decode(simulation.store.get(i))["control"] for i in (0, 1, 3)]
    for name, c in records[-1].server["control"].items():
        torch.testing.assert_close(c, sum(c_i[name] for c_i in own) / 5, rtol=1e-5, atol=1e-6)


def test_the_first_round_by_samples_is_fedavg_bit_for_bit() -> None:
    """All controls are 0."""
    a, _ = rounds(digits(SCAFFOLD(weighting="samples")), 1)
    b, _ = rounds(digits(FedAvg()), 1)
    assert same({g: a[0].server[g] for g in b[0].server}, b[0].server)


@pytest.mark.parametrize("fast", [True, False])
def test_the_gradient_over_batches_is_that_of_all_samples_at_once(fast: bool) -> None:
    """Weight decay, momentum, clipping, augmentation and a dropped last batch have no part in it."""
    training = Training(lr=0.1, batch_size=8, momentum=0.9, weight_decay=0.1, clip=0.01, drop_last=True, augment="flip")
    world = digits(SCAFFOLD(), training=training, fast=fast)
    site = world.site(0, 0, "train")
    with one_thread():
        got = gradient(site, world.initial)
    assert len(site.data) % 8
    assert same({"parameters": site.parameters()}, {"parameters": world.initial["parameters"]})
    loss = plain(site.net, *site.data.take(torch.arange(len(site.data))))
    for name, own in site.net.named_parameters():
        torch.testing.assert_close(got[name], torch.autograd.grad(loss, own, retain_graph=True)[0])


def test_a_client_that_takes_no_step_keeps_its_control() -> None:
    world = toy_q(SCAFFOLD(), training=Training(steps=0))
    c = Tensors(w=torch.tensor(0.8, dtype=torch.float64))
    broadcast = world.method.broadcast(world.method.init_server(world.server_site(0, "init"))) | {"control": c}
    update, state = world.method.client(world.site(0, 0, "train"), broadcast, {"control": c * 2})
    assert state["control"]["w"] == 1.6
    assert update.payload["control"]["w"] == 0


def test_one_control_variate_is_sent_each_way_and_one_is_kept() -> None:
    records, simulation = rounds(digits(SCAFFOLD()), 1)
    up, down = records[0].bytes_up, records[0].bytes_down
    assert up["control"] == up["parameters"] == down["control"] == down["parameters"]
    assert decode(simulation.store.get(0)).keys() == {"control"}
