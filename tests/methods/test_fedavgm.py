"""FedAvgM on Toy Q (see toys.py): FedAvg's step as the gradient of a server with momentum."""

from typing import Any

import pytest

from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedavgm import FedAvgM
from toys import digits, rounds, same, toy_q, w_of

ORACLE = {
    "heavy-ball": [-0.335, -0.82745, -1.2498515],
    "dampened": [-0.0335, -0.0957095, -0.1810825415],
    "nesterov": [-0.6365, -1.0243295, -1.117824349],
}


@pytest.mark.parametrize("variant", ORACLE)
def test_three_rounds_of_each_variant_by_hand(variant: Any) -> None:
    """D = .335 at first, as FedAvg ends at -.335: heavy-ball moves by it, dampened by a tenth, nesterov by 1.9 of it.

    Heavy-ball, round 2: from -.335 FedAvg ends at -.52595, D = .19095, v = .9 * .335 + D = .49245, x = -.82745.
    """
    records, _ = rounds(toy_q(FedAvgM(beta=0.9, variant=variant)), 3)
    assert [w_of(r) for r in records] == pytest.approx(ORACLE[variant], abs=1e-9)


def test_velocity_is_kept_by_the_server_and_not_sent() -> None:
    """v = .335, then .49245; what goes out is FedAvg's broadcast."""
    records, _ = rounds(toy_q(FedAvgM(beta=0.9)), 2)
    assert [w_of(r, "velocity") for r in records] == pytest.approx([0.335, 0.49245], abs=1e-12)
    assert records[0].bytes_down.keys() == {"parameters", "buffers"}
    assert records[0].bytes_up.keys() == {"parameters", "buffers"}


def test_the_servers_rate_scales_the_step_not_the_velocity() -> None:
    """Rate .5: x = -.1675, v = .335. Then client 1 ends at .054325, client 2 at -.592075: mean -.430475,
    D = .262975, v = .564475, x = -.1675 - .2822375 = -.4497375."""
    records, _ = rounds(toy_q(FedAvgM(beta=0.9, server_lr=0.5)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.1675, -0.4497375], abs=1e-12)


def test_a_rate_alone_is_a_shorter_step_of_fedavg() -> None:
    records, _ = rounds(toy_q(FedAvgM(beta=0.0, server_lr=0.5)), 1)
    assert w_of(records[0]) == pytest.approx(-0.1675, abs=1e-12)


@pytest.mark.parametrize("variant", ORACLE)
def test_without_momentum_it_is_fedavg_bit_for_bit(variant: Any) -> None:
    a, _ = rounds(digits(FedAvgM(beta=0.0, variant=variant)), 2)
    b, _ = rounds(digits(FedAvg()), 2)
    assert same({g: a[-1].server[g] for g in b[-1].server}, b[-1].server)
