"""A simulated federation in this process: who is evaluated, and what is known of each."""

import dataclasses

import pytest
from torch import nn

from fedskew.core.method import Method, Update
from fedskew.core.net import Net
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.evaluation.scores import ClientScore
from fedskew.evaluation.summary import summarise
from fedskew.federation.loop import run
from fedskew.federation.simulate.jobs import decode_state
from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods.fedavg import FedAvg
from helpers.nets import received
from toys import digits


def test_a_simulation_in_this_process_keeps_freed_memory_as_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise glibc returns the memory of each large tensor to the system, and every use of it is a page fault."""
    kept: list[bool] = []
    monkeypatch.setattr("fedskew.federation.simulate.simulation.keep_freed_memory", lambda: kept.append(True))
    Simulation(digits(FedAvg()), workers=1)
    assert kept


def test_only_the_clients_of_the_sample_are_evaluated() -> None:
    world = digits(FedAvg())
    simulation = Simulation(world, evaluated=[1, 3])
    figures = simulation.evaluate(0, received(world))
    assert sorted(simulation.per_client()) == ["1", "3"]
    assert figures.clients.sampled
    assert not Simulation(world).evaluate(0, received(world)).clients.sampled


@dataclasses.dataclass(frozen=True)
class KeepsHead(Method):
    """A method whose clients keep a model of their own without saying so in `personal`."""

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        update, _ = super().client(site, broadcast, {})
        return update, {"parameters": update.payload["parameters"]} if site.client == 2 else {}


def one_by_one(simulation: Simulation, broadcast: Payload) -> dict[int, ClientScore]:
    """Every client evaluated on its own."""
    world = simulation.world
    return {
        c: world.evaluate_client(c, 0, broadcast, decode_state(simulation.store.get(c)), c in simulation.store)
        for c in simulation.evaluated
    }


@pytest.mark.parametrize("split", ["dirichlet:alpha=0.5,clients=8,min=5", "iid:clients=8+noise:level=0.5"])
@pytest.mark.parametrize("method", [FedAvg(), KeepsHead()])
def test_clients_evaluated_together_have_the_figures_they_have_alone(split: str, method: Method) -> None:
    world = digits(method, split=split)
    simulation = Simulation(world, newcomers=[7])
    train_some(simulation)
    together = simulation.evaluate(1, received(world))
    rows = simulation.per_client()
    alone = one_by_one(simulation, received(world))
    for client, score in alone.items():
        row = rows[str(client)]
        assert row.personal.accuracy == score.personal.accuracy
        assert row.personal.loss == pytest.approx(score.personal.metrics().loss, rel=1e-5)
        assert row.samples == score.personal.samples
    own = method == KeepsHead()
    assert (rows["2"].personal.loss != rows["2"].global_.loss) == own
    expected = summarise(None, alone.values(), frozenset([7]), False, {})
    assert together.clients.never_trained == expected.clients.never_trained == 5
    assert together.clients.personal.mean == pytest.approx(expected.clients.personal.mean)
    assert together.new.personal.per_class == expected.new.personal.per_class


def train_some(simulation: Simulation) -> None:
    world = simulation.world
    list(run(world.method, simulation, world.server_site, 1, lambda round: [1, 2], evaluate=lambda round: False))


@pytest.mark.parametrize(
    ("model", "batch_norm", "shares"),
    [("mlp", "local", True), ("bn", "aggregate", True), ("bn", "local", False), ("bn:untracked", "aggregate", False)],
)
def test_clients_share_batches_only_where_a_sample_does_not_depend_on_the_others(
    model: str, batch_norm: str, shares: bool
) -> None:
    """Otherwise a client's figures would depend on which clients were evaluated with it."""
    world = digits(FedAvg(), training=Training(batch_norm=batch_norm))
    if model != "mlp":
        norm = nn.BatchNorm1d(64, track_running_stats=model == "bn")
        world = dataclasses.replace(
            world, make_net=lambda: Net(nn.Sequential(nn.Flatten(), norm), nn.Linear(64, 10), 64)
        )
    assert world.can_share_batches == shares


def test_jobs_hold_whole_clients_and_about_2000_samples() -> None:
    simulation = Simulation(digits(FedAvg()))
    jobs = simulation._jobs_of([0, 2, 3, 5], [900, 0, 900, 900, 0, 10], round=4)
    assert [(job.clients, job.weight) for job in jobs] == [((0, 2, 3), 2700), ((5,), 10)]
