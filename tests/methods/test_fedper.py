"""FedPer on f = (h b - target)^2 / 2, with a head for each client."""

from __future__ import annotations

import pytest

from fedskew.methods.fedper import FedPer
from helpers.nets import state_of
from helpers.product import deployed, product
from toys import digits, rounds


def test_fedper_trains_body_and_head_together_and_keeps_the_head() -> None:
    """b 0, h 2, lr .1: (.2, 2), as dh = .1 * b = 0; then b .32 and h = 2 - .1 * .2 (.4 - 1) = 2.012."""
    records, simulation = rounds(product(FedPer()), 2)
    assert [float(r.server["parameters"]["body.w"]) for r in records] == pytest.approx([0.2, 0.32], abs=1e-12)
    assert set(records[-1].server["parameters"]) == {"body.w"}
    assert float(state_of(simulation, 0)["parameters"]["head.w"]) == pytest.approx(2.012, abs=1e-12)


def test_fedper_heads_follow_their_own_clients() -> None:
    """Start b .5, h 2, targets 1, 3, 5. Client 1 (error -2): h 2.1, b .9. Client 0 on b .9 (error .8):
    h = 2 - .1 * .9 * .8 = 1.928, b = .9 - .16 = .74. Client 1 again, from h 2.1 on b .74 (error -1.446):
    h = 2.1 + .1 * .74 * 1.446 = 2.207004. Client 2 never takes part: it has the initial head."""
    world = product(FedPer(), targets=(1.0, 3.0, 5.0), start=(0.5, 2.0))
    records, simulation = rounds(world, 3, cohorts=[[1], [0], [1]])
    heads = [deployed(world, c, records[-1].server, state_of(simulation, c))[1] for c in range(3)]
    assert heads == pytest.approx([1.928, 2.207004, 2.0], abs=1e-12)


def test_fedper_weights_bodies_by_samples() -> None:
    """Targets 1 and -1 on 1 and 3 samples: bodies .2 and -.2, mean .2 / 4 - .2 * 3 / 4 = -.1."""
    records, _ = rounds(product(FedPer(), targets=(1.0, -1.0), sizes=(1, 3)), 1)
    assert float(records[0].server["parameters"]["body.w"]) == pytest.approx(-0.1, abs=1e-12)


def test_fedper_new_clients_may_take_the_mean_of_the_heads() -> None:
    """Targets 3 and 1 on 1 and 3 samples, b .5, h 2: heads 2.1 and (error 0) 2, mean (2.1 + 3 * 2) / 4 = 2.025.
    Who has a head of its own keeps it."""
    world = product(FedPer(share_head_mean=True), targets=(3.0, 1.0, 9.0), sizes=(1, 3, 1), start=(0.5, 2.0))
    records, simulation = rounds(world, 1, cohorts=[[0, 1]])
    heads = [deployed(world, c, records[-1].server, state_of(simulation, c))[1] for c in range(3)]
    assert heads == pytest.approx([2.1, 2.0, 2.025], abs=1e-12)


def test_fedper_sends_no_head_and_has_no_global_model() -> None:
    world = digits(FedPer())
    records, simulation = rounds(world, 1)
    body = sum(t.numel() * 4 for name, t in world.initial["parameters"].items() if name.startswith("body."))
    assert records[0].bytes_up["parameters"] == records[0].bytes_down["parameters"] == body * world.population
    metrics = simulation.evaluate(0, records[-1].server)
    assert metrics.global_ is None
    assert metrics.clients.global_ is None
    assert metrics.clients.personal.mean > 0
