"""MOON: the contrast on numbers, which models it contrasts, and the model a client keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.testing import assert_close

from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.world import World
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.moon import MOON, PREVIOUS, model_contrast
from helpers.nets import normed, received, state_of, work
from toys import digits, rounds, same, toy_q, w_of

Z, Z_G, Z_PREV = (torch.tensor([z], dtype=torch.float64) for z in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0)))


@pytest.mark.parametrize(("tau", "value"), [(0.5, 0.2176217216), (1.0, 0.4008335265)])
def test_the_contrast_on_numbers(tau: float, value: float) -> None:
    """cos(z, z_g) = 1/sqrt 2, cos(z, z_prev) = 0: log(1 + e^{-.707107 / tau}); times mu = 5 at tau .5: 1.088108608."""
    assert model_contrast(Z, Z_G, Z_PREV, tau).item() == pytest.approx(value, abs=1e-10)
    assert 5 * model_contrast(Z, Z_G, Z_PREV, 0.5).item() == pytest.approx(1.088108608, abs=1e-9)


def test_the_same_model_twice_gives_log_2_and_no_gradient() -> None:
    z = Z.clone().requires_grad_()
    loss = model_contrast(z, Z_G, Z_G, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    assert z.grad is not None
    assert not z.grad.any()


def normal(seed: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_contrast_is_the_batch_mean_of_a_two_way_softmax_of_cosines() -> None:
    z, z_g, z_prev = (normal(seed) for seed in range(3))
    logits = torch.stack([cosine_similarity(z, z_g), cosine_similarity(z, z_prev)], 1) / 0.3
    assert_close(model_contrast(z, z_g, z_prev, 0.3), cross_entropy(logits, torch.zeros(5, dtype=torch.int64)))
    assert_close(model_contrast(7 * z, 0.1 * z_g, 3 * z_prev, 0.3), model_contrast(z, z_g, z_prev, 0.3))


def trained_once(world: World, client: int) -> tuple[Payload, Payload]:
    """(the server's broadcast, the client's state) after a round of all clients."""
    records, simulation = rounds(world, 1)
    return world.method.broadcast(records[0].server), state_of(simulation, client)


def features(net: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        z: Tensor = net.eval().body(x)  # type: ignore[operator]
    return z


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_the_objective_contrasts_the_model_received_with_the_client_s_last_own(policy: str) -> None:
    """With batch norm: both in evaluation mode, each with its own statistics; received ones are the client's if local.

    The model that trains has left both, as it has after a step; here it has the initial values, in training mode.
    """
    method = MOON(mu=3.0, tau=0.5)
    training = Training(lr=0.1, batch_size=16, batch_norm=policy)  # type: ignore[arg-type]
    world = normed(method, training=training)
    broadcast, state = trained_once(world, 1)
    site = world.site(1, 1, "train")
    x, y = site.data.take(torch.arange(16))
    own = {group: state[place] for place, group in PREVIOUS.items()}
    if policy != "frozen":
        assert (own["buffers"]["body.2.running_mean"] != 0).all()
    site.load(broadcast, state)
    z_g = features(site.net, x)
    site.load(own)
    z_prev = features(site.net, x)
    loss = method.objective(site, broadcast, state)
    site.load()
    z = site.net.train().body(x)
    wanted = cross_entropy(site.net.head(z), y) + 3 * model_contrast(z, z_g, z_prev, 0.5)
    assert_close(loss(site.net, x, y), wanted)
    assert_close(loss(site.net, x, y), wanted)  # the frozen models have not moved


def test_the_frozen_models_get_no_gradient() -> None:
    method = MOON()
    world = digits(method)
    broadcast, state = trained_once(world, 0)
    site = world.site(0, 1, "train")
    loss = method.objective(site, broadcast, state)
    site.load(broadcast)
    loss(site.net, *site.data.take(torch.arange(8))).backward()  # type: ignore[no-untyped-call]
    assert len(site.spares) == 2
    assert all(p.grad is None for net in site.spares for p in net.parameters() if not p.requires_grad)
    assert not any(p.requires_grad for net in site.spares for p in net.parameters())


def test_a_client_s_first_round_is_fedavg_s_whenever_it_comes() -> None:
    """Client 2 comes in the second round: its update is FedAvg's from the same broadcast, client 0's is not."""
    world, plain = digits(MOON()), digits(FedAvg())
    records, simulation = rounds(world, 1, cohorts=[[0, 1]])
    first, _ = rounds(plain, 1, cohorts=[[0, 1]])
    assert same(records[0].server, first[0].server)
    broadcast = world.method.broadcast(records[0].server)

    def equal(client: int) -> bool:
        ours = work(world, client, 1, broadcast, state_of(simulation, client)).update
        return same(ours.payload, work(plain, client, 1, broadcast, {}).update.payload)

    assert equal(2)
    assert not equal(0)


def test_a_client_keeps_its_own_trained_model_until_it_takes_part_again() -> None:
    world = normed(MOON())
    broadcast = received(world)
    done = work(world, 0, 0, broadcast, {})
    _, simulation = rounds(world, 2, cohorts=[[0], [1]])
    kept = state_of(simulation, 0)
    assert kept.keys() == {"previous", "previous_buffers"}  # and no part of the model it will start from
    assert same({group: kept[place] for place, group in PREVIOUS.items()}, done.update.payload)
    again = work(world, 0, 2, broadcast, kept)
    assert same({group: again.state[place] for place, group in PREVIOUS.items()}, again.update.payload)
    assert not same(again.state, kept)


def test_nothing_extra_travels() -> None:
    ours, _ = rounds(digits(MOON()), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert (ours[-1].bytes_up, ours[-1].bytes_down) == (plain[-1].bytes_up, plain[-1].bytes_down)


def test_features_stay_nearer_to_the_received_model_s_with_a_larger_mu() -> None:
    def gap(mu: float) -> float:
        """cos(z, z_g) - cos(z, z_prev) after a client's second round, over its samples."""
        world = digits(MOON(mu=mu))
        records, simulation = rounds(digits(MOON(mu=1.0)), 1)
        broadcast, state = world.method.broadcast(records[0].server), state_of(simulation, 1)
        update = work(world, 1, 1, broadcast, state).update
        site = world.site(1, 1, "train")
        own = {group: state[place] for place, group in PREVIOUS.items()}
        z, z_g, z_prev = (site.infer(site.frozen(model).body) for model in (update.payload, broadcast, own))
        return float((cosine_similarity(z, z_g) - cosine_similarity(z, z_prev)).mean())

    assert gap(10.0) > gap(1.0) > gap(0.0)


def test_without_its_term_it_is_fedavg_bit_for_bit_and_keeps_nothing() -> None:
    ours, simulation = rounds(digits(MOON(mu=0.0)), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    plain, _ = rounds(digits(FedAvg()), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    assert same(ours[-1].server, plain[-1].server)
    assert state_of(simulation, 0) == {}


def test_without_its_term_it_is_fedavg_on_numbers() -> None:
    """Toy Q: -.335, -.52595."""
    records, _ = rounds(toy_q(MOON(mu=0.0)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.335, -0.52595], abs=1e-12)
