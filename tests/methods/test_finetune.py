"""FineTune on Toy Q (see toys.py): FedAvg's model, -.335 after a round, then a client's own steps."""

import pytest

from fedskew.core.seeding import one_thread
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.finetune import FineTune
from toys import digits, rounds, same, toy_q


@pytest.mark.parametrize(("epochs", "own"), [(2, [-0.08135, -0.67415]), (1, [-0.2015, -0.5345]), (0, [-0.335, -0.335])])
def test_a_client_deploys_what_its_own_epochs_make_of_the_servers_model(epochs: int, own: list[float]) -> None:
    """From -.335, one step an epoch: w - 1 shrinks by .9, w + 1 by .7."""
    world = toy_q(FineTune(epochs=epochs))
    records, _ = rounds(world, 1)
    deployed = [world.method.personalise(world.site(i, 0, "evaluate"), records[0].server, {}) for i in (0, 1)]
    assert [float(model["parameters"]["w"]) for model in deployed] == pytest.approx(own, abs=1e-12)


def test_its_global_model_is_fedavgs_bit_for_bit() -> None:
    a, _ = rounds(digits(FineTune()), 2)
    b, _ = rounds(digits(FedAvg()), 2)
    assert same(a[-1].server, b[-1].server)


def test_nothing_of_it_is_kept() -> None:
    world = digits(FineTune(epochs=1))
    records, _ = rounds(world, 1)
    server = {group: tensors | {} for group, tensors in records[0].server.items()}
    with one_thread():
        first, again = (world.evaluate_client(0, 0, records[0].server, {}, True) for _ in range(2))
    assert first == again
    assert first.personal.loss != first.shared.loss
    assert same(server, records[0].server)
