"""Sites are made from (seed, purpose, client, round) alone; clients and the test set are evaluated piece by piece."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct
from torch import Tensor, nn

from fedskew.core.fit import batches
from fedskew.core.method import Method
from fedskew.core.seeding import Purpose, one_thread, seeded
from fedskew.core.training import Training
from fedskew.evaluation.summary import Summary
from fedskew.federation import world as worlds
from fedskew.federation.world import World
from fedskew.methods.fedavg import FedAvg
from helpers.nets import normed, received, work
from toys import digits, rounds


def first_draw(*key: int) -> float:
    return float(torch.rand((), generator=seeded(*key)))


def labels_in_order(world: World, client: int, round: int) -> Tensor:
    site = world.site(client, round, "train")
    return torch.cat([y for _, y in batches(site, site.training)])


def test_every_number_of_a_key_counts_also_its_sign() -> None:
    keys = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 1, -2), (0, 1)]
    assert len({first_draw(*key) for key in keys}) == len(keys)
    assert first_draw(0, 1, -2) == first_draw(0, 1, -2)


def test_one_thread_is_given_back_as_it_was() -> None:
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_client_shuffles_its_samples_anew_in_every_round() -> None:
    world = digits(FedAvg())
    assert torch.equal(labels_in_order(world, 0, 1), labels_in_order(world, 0, 1))
    assert not torch.equal(labels_in_order(world, 0, 1), labels_in_order(world, 0, 2))


def test_sites_of_other_clients_purposes_and_seeds_draw_other_numbers() -> None:
    world = digits(FedAvg())
    sites = [
        world.site(0, 0, "train"),
        world.site(1, 0, "train"),
        world.site(-1, 0, "train"),
        world.site(0, 0, "evaluate", Purpose.EVALUATE),
        replace(world, seed=1).site(0, 0, "train"),
    ]
    assert len({float(torch.rand((), generator=site.rng)) for site in sites}) == len(sites)


def test_two_clients_see_one_sample_with_noise_of_their_own() -> None:
    world = replace(digits(FedAvg()), noise=(0.5,) * 5)
    one, other, again = (world.pool(torch.tensor([3]), client).take(torch.tensor([0]))[0] for client in (0, 1, 0))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_client_that_never_trained_is_marked() -> None:
    world = digits(FedAvg())
    for trained in (True, False):
        assert world.evaluate_client(0, 0, received(world), {}, trained).fallback != trained


def test_a_client_with_statistics_of_its_own_is_evaluated_with_them() -> None:
    """With batch norm kept locally, a model without statistics goes by the batch's; a client's own is used as it is."""
    world = normed(FedAvg(), training=Training(lr=0.1, batch_size=16, batch_norm="local"))
    done = work(world, 0, 0, received(world), {})
    kept = world.evaluate_client(0, 0, done.update.payload, done.state, trained=True)
    strange = {"buffers": done.state["buffers"] | {"body.2.running_mean": torch.full((16,), 1e6)}}
    moved = world.evaluate_client(0, 0, done.update.payload, strange, trained=True)
    assert moved.personal.loss != kept.personal.loss
    assert moved.shared == kept.shared


def test_the_pieces_of_the_test_set_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 samples in pieces of 30: 30, 30, 30 and 10."""
    world = digits(FedAvg())
    whole = world.evaluate_global(0, 0, received(world))
    monkeypatch.setattr(worlds, "CHUNK", 30)
    assert world.chunks() == 4
    scores = [world.evaluate_global(piece, 0, received(world)) for piece in range(4)]
    assert [score.samples for score in scores] == [30, 30, 30, 10]
    summary = Summary()
    for score in scores:
        summary.add_test(score)
    found, wanted = summary.metrics(False, {}).global_, whole.metrics()
    assert replace_struct(found, loss=0.0) == replace_struct(wanted, loss=0.0)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)


def test_a_world_takes_no_positional_arguments() -> None:
    """Eleven arrays and index lists in a row would be swapped without anyone noticing."""
    with pytest.raises(TypeError, match="positional"):
        World(FedAvg(), Training())  # type: ignore[misc]


@dataclass(frozen=True)
class OtherHead(Method):
    """Trains a head with one more layer, of random values."""

    def prepare(self, net: Any, rng: torch.Generator) -> Any:
        last = nn.Linear(10, 10, bias=False)
        last.weight.data = torch.randn(10, 10, generator=rng)
        net.head = nn.Sequential(net.head, last)
        return net


def test_the_head_that_a_method_prepares_is_the_one_of_every_net() -> None:
    """The scratch net, frozen nets, the initial model, what is sent, what a worker process builds, and evaluation."""
    world = digits(OtherHead(), hidden="12")
    weight = world.initial["parameters"]["head.1.weight"]
    assert torch.equal(weight, torch.randn(10, 10, generator=seeded(0, Purpose.NET)))
    assert torch.equal(world.site(0, 0, "train").frozen().head[1].weight, weight)
    elsewhere = pickle.loads(pickle.dumps(world.with_arrays(world.arrays())))
    assert torch.equal(elsewhere.net.head[1].weight, weight)
    assert not torch.equal(digits(OtherHead(), hidden="12", seed=1).net.head[1].weight, weight)
    records, simulation = rounds(world, 2)
    server = records[-1].server
    assert not torch.equal(server["parameters"]["head.1.weight"], weight)
    site = world.server_site(2, "evaluate")
    site.load(server)
    accuracy = float((site.infer(site.net).argmax(1) == world.y_test).float().mean())
    assert simulation.evaluate(1, server).global_.accuracy == pytest.approx(accuracy)
