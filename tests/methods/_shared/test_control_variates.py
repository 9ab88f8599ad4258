"""What methods against client drift share, and that none of them drags batch-norm statistics along."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedskew.core.method import Method
from fedskew.core.net import Net
from fedskew.core.seeding import one_thread
from fedskew.core.tensors import Payload, Tensors, weighted_mean
from fedskew.core.training import Training
from fedskew.methods._shared.control_variates import effective_steps, next_control, tethered, tilted
from fedskew.methods.ditto import Ditto
from fedskew.methods.fedavgm import FedAvgM
from fedskew.methods.feddc import FedDC
from fedskew.methods.feddyn import FedDyn
from fedskew.methods.fednova import FedNova
from fedskew.methods.local import Local
from fedskew.methods.scaffold import SCAFFOLD
from toys import digits, same


@pytest.fixture(autouse=True)
def as_the_loop_does() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("steps", "momentum", "pull", "a"),
    [
        (0, 0.9, 0.1, 0.0),
        (5, 0.0, 0.0, 5.0),
        (2, 0.9, 0.0, 2.9),
        (4, 0.9, 0.0, 9.049),
        (2, 0.0, 0.1, 1.9),
        (4, 0.0, 0.1, 3.439),
        (2, 0.9, 0.1, 2.8),
    ],
)
def test_effective_steps_by_hand(steps: int, momentum: float, pull: float, a: float) -> None:
    """Momentum: 1 + 1.9 + 2.71 + 3.439. Pull: 1 + .9 + .81 + .729. Both, two steps: 1 + (.9 + 1 - .1)."""
    assert effective_steps(steps, momentum, pull) == pytest.approx(a, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 7, 200])
def test_effective_steps_are_the_closed_forms_of_the_papers(steps: int) -> None:
    rho, pull = 0.9, 0.02
    heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert effective_steps(steps, rho) == pytest.approx(heavy, rel=1e-12)
    assert effective_steps(steps, pull=pull) == pytest.approx((1 - (1 - pull) ** steps) / pull, rel=1e-12)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0), (0.5, 2.0)])
def test_effective_steps_are_how_far_torchs_sgd_goes_along_a_constant_gradient(momentum: float, mu: float) -> None:
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([w], lr=0.1, momentum=momentum)
    for _ in range(6):
        optimiser.zero_grad()
        (3 * w + mu / 2 * w**2).backward()
        optimiser.step()
    assert w.item() == pytest.approx(-0.1 * 3 * effective_steps(6, momentum, 0.1 * mu), rel=1e-12)


def test_a_tilt_adds_its_direction_to_the_gradient_and_a_tether_its_pull() -> None:
    """w = 2: 5 from the loss, -1 from the tilt, 3 * (2 - .5) from the tether."""
    net = nn.ParameterDict({"w": nn.Parameter(torch.tensor(2.0))})

    def line(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 5 * net["w"]

    def slope(loss: Any) -> float:
        return float(torch.autograd.grad(loss(net, None, None), net["w"])[0])

    assert slope(tilted(line, {"w": torch.tensor(-1.0)})) == 4
    assert slope(tethered(line, {"w": torch.tensor(0.5)}, 3.0)) == 9.5
    assert tethered(line, {"w": torch.tensor(0.5)}, 0.0) is line


def test_the_next_control_is_the_gradient_without_the_correction() -> None:
    """Steps of .2 in all led from 1 to .4, a mean of 3 of which c - c_i = 2 was correction; no step, no news."""
    c_i, c = Tensors(w=torch.tensor(-1.5)), Tensors(w=torch.tensor(0.5))
    assert float(next_control(c_i, c, Tensors(w=torch.tensor(0.6)), 0.2)["w"]) == pytest.approx(1.0)
    assert next_control(c_i, c, c.zeros(), 0.0) is c_i


def batch_normed() -> Net:
    """A small net for digits whose statistics move fast."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=0.5), nn.ReLU())
    return Net(body, nn.Linear(8, 10), 8)


UNIFORM = (SCAFFOLD, FedDyn, FedDC)
METHODS = [
    FedAvgM(beta=0.9),
    FedAvgM(beta=0.9, variant="nesterov", server_lr=2.0),
    SCAFFOLD(server_lr=2.0),
    SCAFFOLD(option="I", weighting="samples"),
    FedNova(),
    FedNova(mu=0.1),
    FedDyn(alpha=0.1),
    FedDC(alpha=0.1),
    Ditto(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_batch_norm_statistics_get_the_plain_mean_whatever_the_parameters_get(method: Method) -> None:
    """Weighted as the parameters are; a counter is the largest. Cohorts of 3 of 5."""
    training = Training(lr=0.05, batch_size=8, momentum=0.9)
    world = replace(digits(method, training=training), make_net=batch_normed)
    server: Payload = method.init_server(world.server_site(0, "init"))
    states: dict[int, Payload] = {}
    uniform = isinstance(method, UNIFORM) and (type(method) is not SCAFFOLD or method.weighting == "uniform")
    for round, cohort in enumerate([[0, 1, 2], [1, 3, 4], [0, 1, 4]]):
        done = [world.train_client(i, round, "train", method.broadcast(server), states.get(i, {})) for i in cohort]
        states |= {i: d.state for i, d in zip(cohort, done, strict=True)}
        updates = [d.update for d in done]
        server = method.aggregate(world.server_site(round, "train"), server, iter(updates))
        plain = weighted_mean((u.payload["buffers"], 1.0 if uniform else u.weight) for u in updates)
        assert same({"buffers": server["buffers"]}, {"buffers": plain})
        assert all((v >= 0).all() for name, v in server["buffers"].items() if name.endswith("running_var"))
        assert all(t.isfinite().all() for group in server.values() for t in group.values())


@pytest.mark.parametrize("method", [*METHODS, Local()], ids=repr)
def test_local_batch_norm_statistics_are_kept_in_the_clients_state(method: Method) -> None:
    """`batch_norm = local`: no buffers on the wire, and a client continues from its own; they count its steps alone."""
    training = Training(lr=0.05, batch_size=8, batch_norm="local")
    world = replace(digits(method, training=training), make_net=batch_normed)
    server = method.init_server(world.server_site(0, "init"))
    state: Payload = {}
    steps, counted = -(-len(world.train[1]) // 8), []
    for round in range(2):
        update, state, _ = world.train_client(1, round, "train", method.broadcast(server), state)
        server = method.aggregate(world.server_site(round, "train"), server, iter([update]))
        counted.append(int(state["buffers"]["body.2.num_batches_tracked"]))
        assert "buffers" not in update.payload
    assert counted == [steps, 2 * steps]


def test_dittos_personal_model_has_statistics_of_its_own() -> None:
    world = replace(digits(Ditto(lam=0.1)), make_net=batch_normed)
    server = world.method.init_server(world.server_site(0, "init"))
    first = world.train_client(0, 0, "train", server, {})
    other = world.train_client(1, 0, "train", server, {})
    server = world.method.aggregate(world.server_site(0, "train"), server, iter([other.update]))
    second = world.train_client(0, 1, "train", server, first.state)
    own = world.method.personalise(world.site(0, 1, "evaluate"), server, second.state)
    steps = int(first.update.payload["buffers"]["body.2.num_batches_tracked"])
    assert int(own["buffers"]["body.2.num_batches_tracked"]) == 2 * steps
    assert same(own, {"parameters": second.state["personal"], "buffers": second.state["personal_buffers"]})
    assert not torch.equal(own["buffers"]["body.2.running_mean"], server["buffers"]["body.2.running_mean"])
