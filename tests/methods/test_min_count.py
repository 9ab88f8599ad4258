"""No class statistic of fewer than `min_count` samples leaves a site, whatever the method."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from fedskew.core.method import Method
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.world import World
from fedskew.methods import REGISTRY
from fedskew.methods._shared.prototypes import enough
from fedskew.models import build

SIZES = (4, 5, 1, 0)  # samples of each class at the only client
METHODS: dict[str, Method] = {
    name: REGISTRY[name](**REGISTRY[name].quick | options)
    for name, options in {
        "fedproto": {},
        "fedproc": {},
        "fedmr": {},
        "fedpg": {"source": "generator"},
        "fedcd": {"M": 1},
        "ccvr": {},
        "creff": {},
        "fedgen": {},
        "fedncm": {},
    }.items()
}


def world_of(method: Method, min_count: int) -> World:
    """One client with 4, 5, 1 and 0 samples of four classes."""
    labels = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    images = torch.randint(256, (len(labels), 8, 8, 1), generator=seeded(0), dtype=torch.uint8)
    return world_from_tensors(
        method,
        Training(steps=1, batch_size=10),
        partial(build, "mlp", (1, 8, 8), len(SIZES), seed=0, hidden="6"),
        images,
        labels,
        [np.arange(len(labels))],
        classes=len(SIZES),
        rounds=len(method.stages(2)),
        mean=(0.5,),
        std=(0.5,),
        min_count=min_count,
    )


def statistics(method: Method, min_count: int) -> dict[str, Tensors]:
    """The groups with class statistics that the client sends, of all stages, by group."""
    world = world_of(method, min_count)
    server, found = method.init_server(world.server_site(0, "init")), dict[str, Tensors]()
    with one_thread():
        for round, stage in enumerate(dict.fromkeys(method.stages(2))):
            update, _ = method.client(world.site(0, round, stage), method.broadcast(server), {})
            found |= {group: tensors for group, tensors in update.payload.items() if "count" in tensors}
            server = method.aggregate(world.server_site(round, stage), server, iter([update]))
    assert all(t.isfinite().all() for ts in server.values() for t in ts.values() if t.is_floating_point())
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_class_of_too_few_samples_leaves_zeros(name: str) -> None:
    (all_of_them,), (kept,) = statistics(METHODS[name], 1).values(), statistics(METHODS[name], 5).values()
    assert (all_of_them["count"] > 0).tolist() == [True, True, True, False]
    assert (kept["count"] > 0).tolist() == [False, True, False, False]
    for tensor_name, t in kept.items():
        assert not t[[0, 2, 3]].any(), tensor_name
        assert torch.equal(t[1], all_of_them[tensor_name][1])


@pytest.mark.parametrize("name", METHODS)
def test_a_site_without_any_class_of_enough_samples_does_not_stop_the_server(name: str) -> None:
    (kept,) = statistics(METHODS[name], 6).values()
    assert not any(t.any() for t in kept.values())


def test_every_method_that_sends_counts_by_class_is_tested_here() -> None:
    """A new one must be added above. Only groups with a `count` are class statistics."""
    sending = set()
    for name, kind in REGISTRY.items():
        if not kind.public and not kind.pooled and name not in METHODS and statistics(kind(**kind.quick), 1):
            sending.add(name)
    assert sending == set()


def test_enough_by_hand() -> None:
    of = Tensors(mean=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), count=torch.tensor([1.0, 2.0]))
    assert enough(of, 2)["mean"].tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert enough(of, 2)["count"].tolist() == [0.0, 2.0]
