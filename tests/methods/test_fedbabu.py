"""FedBABU on f = (h b - 1)^2 / 2: one number for the body, one for the head. Also the toy of FedPer and FedRep."""

from __future__ import annotations

from typing import Literal

import pytest

from fedskew.core.training import Training
from fedskew.methods.fedbabu import FedBABU
from helpers.nets import state_of
from helpers.product import deployed, product
from toys import digits, rounds


def test_fedbabu_trains_the_body_under_a_head_that_stays() -> None:
    """b 0, h 2, lr .1: b = 0 + .1 * 2 = .2; b = .2 - .1 * 2 (.4 - 1) = .32; h is 2 throughout."""
    world = product(FedBABU(finetune="none"))
    records, _ = rounds(world, 2)
    assert [float(r.server["parameters"]["body.w"]) for r in records] == pytest.approx([0.2, 0.32], abs=1e-12)
    assert deployed(world, 0, records[-1].server, {})[1] == 2.0


def test_fedbabu_sends_the_body_alone_and_keeps_nothing() -> None:
    world = digits(FedBABU())
    records, simulation = rounds(world, 1)
    body = sum(t.numel() * 4 for name, t in world.initial["parameters"].items() if name.startswith("body."))
    assert records[0].bytes_up["parameters"] == records[0].bytes_down["parameters"] == body * world.population
    assert not any(name.startswith("head.") for group in records[0].server.values() for name in group)
    assert state_of(simulation, 0) == {}


def test_fedbabu_weight_decay_does_not_reach_the_head() -> None:
    world = product(FedBABU(finetune="none"), training=Training(lr=0.1, weight_decay=0.5, momentum=0.9, batch_size=100))
    world.train_client(0, 0, "train", world.method.init_server(world.server_site(0, "init")), {})
    assert world.net.head.w.item() == 2.0
    assert world.net.body.w.item() == pytest.approx(0.2, abs=1e-12)


@pytest.mark.parametrize(("weighting", "b"), [("uniform", 0.0), ("samples", -0.1)])
def test_fedbabu_averages_bodies_by_samples_or_uniformly(weighting: Literal["uniform", "samples"], b: float) -> None:
    """Targets 1 and -1 on 1 and 3 samples: bodies .2 and -.2; (.2 - .2) / 2 = 0, .2 / 4 - .2 * 3 / 4 = -.1."""
    assert FedBABU().weighting == "samples"
    records, _ = rounds(product(FedBABU(weighting=weighting), targets=(1.0, -1.0), sizes=(1, 3)), 1)
    assert float(records[0].server["parameters"]["body.w"]) == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize(
    ("finetune", "epochs", "model"),
    [
        ("none", 5, (0.2, 2.0)),
        ("all", 0, (0.2, 2.0)),
        ("head", 1, (0.2, 2.012)),
        ("head", 2, (0.2, 2.023952)),
        ("all", 1, (0.32, 2.012)),
    ],
)
def test_fedbabu_personalises_by_fine_tuning(
    finetune: Literal["none", "head", "all"], epochs: int, model: tuple[float, float]
) -> None:
    """From b .2, h 2 the error is -.6: db = -.1 * 2 * -.6 = .12 and dh = -.1 * .2 * -.6 = .012."""
    world = product(FedBABU(finetune=finetune, finetune_epochs=epochs), start=(0.2, 2.0))
    received = world.method.init_server(world.server_site(0, "init"))
    assert deployed(world, 0, received, {}) == pytest.approx(model, abs=1e-12)


def test_fedbabu_is_evaluated_both_as_received_and_fine_tuned() -> None:
    world = digits(FedBABU(finetune_epochs=5))
    records, _ = rounds(world, 2)
    tuned = world.evaluate_client(0, 1, records[-1].server, {}, True)
    plain = digits(FedBABU(finetune="none")).evaluate_client(0, 1, records[-1].server, {}, True)
    assert tuned.shared == plain.shared == plain.personal
    assert tuned.personal.loss < plain.personal.loss
