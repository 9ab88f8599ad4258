"""FedRep on f = (h b - target)^2 / 2: the head first, then the body."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from fedskew.core.training import Training
from fedskew.methods.fedrep import FedRep
from helpers.nets import normed, state_of
from helpers.product import deployed, product
from toys import digits, rounds


def test_fedrep_fits_the_head_and_then_the_body() -> None:
    """b .2, h 2: h = 2 + .1 * .2 * .6 = 2.012; h = 2.012 + .02 * .5976 = 2.023952; then
    b = .2 + .1 * 2.023952 * .5952096 = .320467566."""
    records, simulation = rounds(product(FedRep(head_epochs=2), start=(0.2, 2.0)), 1)
    assert float(records[0].server["parameters"]["body.w"]) == pytest.approx(0.320467566, abs=1e-9)
    assert float(state_of(simulation, 0)["parameters"]["head.w"]) == pytest.approx(2.023952, abs=1e-12)


def test_fedrep_has_a_fresh_optimiser_in_each_phase() -> None:
    """With momentum .9: heads 2.012 and 2.012 + .011952 + .9 * .012 = 2.034752 (error -.5930496); the first step of
    the body is its gradient alone: .2 + .1 * 2.034752 * .5930496 = .32067089. Weight decay .5 would shrink whatever
    it reaches: with two head epochs b is still .2 when the body phase starts."""
    training = Training(lr=0.1, momentum=0.9, batch_size=100)
    records, simulation = rounds(product(FedRep(head_epochs=2), training=training, start=(0.2, 2.0)), 1)
    assert float(state_of(simulation, 0)["parameters"]["head.w"]) == pytest.approx(2.034752, abs=1e-12)
    assert float(records[0].server["parameters"]["body.w"]) == pytest.approx(0.32067089, abs=1e-8)

    decayed = product(
        FedRep(head_epochs=2, body_epochs=0), training=Training(lr=0.1, weight_decay=0.5), start=(0.2, 2.0)
    )
    assert float(rounds(decayed, 1)[0][0].server["parameters"]["body.w"]) == 0.2


def test_fedrep_head_phase_leaves_the_body_and_its_statistics_bit_for_bit() -> None:
    world = normed(FedRep(head_epochs=3, body_epochs=0))
    records, _ = rounds(world, 1)
    for group in ("parameters", "buffers"):
        for name, t in records[0].server[group].items():
            assert torch.equal(t, world.initial[group][name]), name


def test_fedrep_heads_follow_their_own_clients() -> None:
    """Head only, b .5, h 2, lr .1: client 1 (target 3) 2.1, client 0 (target 3) 2.1, then client 1 again
    2.1 + .05 * (3 - 1.05) = 2.1975; client 2 has the initial head."""
    world = product(FedRep(head_epochs=1, body_epochs=0), targets=(3.0, 3.0, 5.0), start=(0.5, 2.0))
    records, simulation = rounds(world, 3, cohorts=[[1], [0], [1]])
    heads = [deployed(world, c, records[-1].server, state_of(simulation, c))[1] for c in range(3)]
    assert heads == pytest.approx([2.1, 2.1975, 2.0], abs=1e-12)


@pytest.mark.parametrize(("weighting", "b"), [("uniform", 0.0), ("samples", -0.1)])
def test_fedrep_averages_bodies_uniformly_by_default(weighting: Literal["uniform", "samples"], b: float) -> None:
    """Targets 1 and -1 on 1 and 3 samples, b 0 (the head does not move): bodies .2 and -.2."""
    records, _ = rounds(product(FedRep(weighting=weighting), targets=(1.0, -1.0), sizes=(1, 3)), 1)
    assert float(records[0].server["parameters"]["body.w"]) == pytest.approx(b, abs=1e-12)


def test_fedrep_new_clients_may_take_the_mean_of_the_heads() -> None:
    """Head only, b .5, h 2: target 3 gives 2.1, target 1 stays at 2; uniform mean 2.05."""
    method = FedRep(head_epochs=1, body_epochs=0, share_head_mean=True)
    world = product(method, targets=(3.0, 1.0, 9.0), sizes=(1, 3, 1), start=(0.5, 2.0))
    records, simulation = rounds(world, 1, cohorts=[[0, 1]])
    heads = [deployed(world, c, records[-1].server, state_of(simulation, c))[1] for c in range(3)]
    assert heads == pytest.approx([2.1, 2.0, 2.05], abs=1e-12)


def test_fedrep_may_fit_the_head_to_the_received_body_before_a_test() -> None:
    """b .2, h 2: two head epochs 2.023952, the body as received."""
    world = product(FedRep(test_epochs=2), start=(0.2, 2.0))
    received = world.method.init_server(world.server_site(0, "init"))
    assert deployed(world, 0, received, {}) == pytest.approx((0.2, 2.023952), abs=1e-12)


def test_fedrep_sends_no_head_and_has_no_global_model() -> None:
    world = digits(FedRep(head_epochs=1))
    records, simulation = rounds(world, 1)
    assert not any(name.startswith("head.") for name in records[0].server["parameters"])
    metrics = simulation.evaluate(0, records[-1].server)
    assert metrics.global_ is None
    assert metrics.clients.global_ is None
