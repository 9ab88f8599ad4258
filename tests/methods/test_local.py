"""Local: a client's model is what plain training on its own data makes of the common initial model."""

import pytest

from fedskew.core.method import Method
from fedskew.core.seeding import one_thread
from fedskew.core.tensors import Payload
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode
from fedskew.federation.world import World
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.local import Local
from toys import digits, rounds, same, toy_q


def test_rounds_add_up_to_plain_training() -> None:
    """Two steps a round; w - 1 shrinks by .9 a step, w + 1 by .7. Client 1 takes part twice, client 2 once."""
    _, simulation = rounds(toy_q(Local()), 2, cohorts=[[0, 1], [0]])
    own = [float(decode(simulation.store.get(i))["parameters"]["w"]) for i in (0, 1)]
    assert own == pytest.approx([1 - 0.9**4, 0.7**2 - 1], abs=1e-12)


def test_nothing_travels() -> None:
    records, _ = rounds(digits(Local()), 2)
    for record in records:
        assert sum(record.bytes_up.values()) == sum(record.bytes_down.values()) == 0
    assert not any(records[-1].server.values())


def test_the_first_round_is_fedavgs_client_bit_for_bit() -> None:
    def world_and_server(method: Method) -> tuple[World, Payload]:
        world = digits(method)
        return world, method.broadcast(method.init_server(world.server_site(0, "init")))

    (alone, nothing), (shared, server) = world_and_server(Local()), world_and_server(FedAvg())
    with one_thread():
        state = alone.train_client(1, 0, "train", nothing, {}).state
        update = shared.train_client(1, 0, "train", server, {}).update
    assert same({"parameters": state["parameters"]}, {"parameters": update.payload["parameters"]})


def test_there_is_no_global_model_and_each_client_is_evaluated_with_its_own() -> None:
    world = digits(Local(), count=2)
    simulation = Simulation(world)
    record = list(run(world.method, simulation, world.server_site, 2, lambda round: [0, 1, 2]))[-1]
    assert record.metrics.global_ is None
    assert record.metrics.clients.global_ is None
    assert record.metrics.clients.never_trained == 2
    rows = simulation.per_client()
    assert rows["0"].personal.accuracy > rows["4"].personal.accuracy
