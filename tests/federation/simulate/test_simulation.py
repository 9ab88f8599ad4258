"""A simulated federation in this process: who is evaluated, and what is known of each."""

from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods.fedavg import FedAvg
from helpers.nets import received
from toys import digits


def test_only_the_clients_of_the_sample_are_evaluated() -> None:
    world = digits(FedAvg())
    simulation = Simulation(world, evaluated=[1, 3])
    figures = simulation.evaluate(0, received(world))
    assert sorted(simulation.per_client()) == ["1", "3"]
    assert figures.clients.sampled
    assert not Simulation(world).evaluate(0, received(world)).clients.sampled
