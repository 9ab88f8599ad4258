"""One step of a method against what other code computes on the same inputs; the figures are theirs, run once.

FedRS: the authors' lxcnju/FedRepo 617ee01. FedExP: the authors' Divyansh03/FedExP 34b05a2. IFCA: the authors'
jichan3751/ifca 61e44b8. FedNCM: the authors' GwenLegate/GuidingLastLayerFLPretrain 54b5d1e. The authors' repository of
FedRoD (hongyouc/Fed-RoD) has no code and none was found for FedLC: KarhouTam/FL-bench 06e658b for FedLC and for
FedAdam, FedYogi and FedAdagrad, TsingZ0/PFLlib d832e76 for FedRoD. All of them on the CPU with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, tensor
from torch.testing import assert_close

from fedskew.core.method import Method, Update
from fedskew.core.net import Net
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.world import World
from fedskew.methods.fedadagrad import FedAdagrad
from fedskew.methods.fedadam import FedAdam
from fedskew.methods.fedexp import ITERATE, FedExP, square_norm
from fedskew.methods.fedlc import FedLC
from fedskew.methods.fedncm import nearest_mean_head
from fedskew.methods.fedrod import FedRoD
from fedskew.methods.fedrs import FedRS
from fedskew.methods.fedyogi import FedYogi
from fedskew.methods.ifca import IFCA, model_number
from helpers.nets import received, work

near = partial(assert_close, rtol=1e-5, atol=2e-7)
X = tensor([[1.0, 2.0], [0.0, -1.0], [2.0, 0.5], [-1.0, 1.0]])
Y = tensor([0, 1, 1, 1])  # of three classes: no sample of class 2


def two_linears(bias: bool = True) -> Net:
    """Two features, three classes; a head without bias is one whose bias is 0 and is not trained."""
    net = Net(nn.Linear(2, 2), nn.Linear(2, 3), 2)
    with torch.no_grad():
        net.body.weight.copy_(tensor([[1.0, 0.5], [-0.5, 1.0]]))
        net.body.bias.copy_(tensor([0.1, -0.1]))
        net.head.weight.copy_(tensor([[0.3, -0.2], [0.4, 0.1], [-0.1, 0.5]]))
        net.head.bias.copy_(tensor([0.0, 0.2, -0.1]) if bias else torch.zeros(3))
    return net


def world(method: Method, x: Tensor = X, y: Tensor = Y, clients: int = 1, **net: bool) -> World:
    """Clients of four samples each, one step over all of them with a learning rate of 0.1."""
    parts = [np.arange(4 * c, 4 * c + 4) for c in range(clients)]
    training = Training(lr=0.1, batch_size=4)
    return world_from_tensors(method, training, partial(two_linears, **net), x, y, parts, classes=3, rounds=3)


def test_fedrs_graded_is_the_authors_step() -> None:
    ours = work(w := world(FedRS(alpha=0.5, scope="graded"), bias=False), 0, 0, received(w), {}).update
    assert ours.metrics["loss"] == pytest.approx(1.1342362, abs=1e-6)
    moved = ours.payload["parameters"]
    near(moved["head.weight"], tensor([[0.3170128, -0.1768765], [0.3890208, 0.0792594], [-0.1072700, 0.4930277]]))
    near(moved["body.weight"], tensor([[0.9997138, 0.5006135], [-0.5020879, 0.9884824]]))


def test_fedlc_is_fl_benchs_step() -> None:
    """PFLlib's differs: it calibrates with the counts of all clients together."""
    ours = work(w := world(FedLC(tau=0.7)), 0, 0, received(w), {}).update
    assert ours.metrics["loss"] == pytest.approx(0.7243133, abs=1e-6)
    moved = ours.payload["parameters"]
    near(moved["head.weight"], tensor([[0.3233266, -0.1659695], [0.3766734, 0.0659695], [-0.1, 0.5]]))
    near(moved["head.bias"], tensor([-0.0121697, 0.2121697, -0.1]))
    near(moved["body.weight"], tensor([[0.9993491, 0.4963932], [-0.5019528, 0.9891796]]))


def test_fedrod_is_pfllibs_step_of_the_generic_model_and_then_of_the_own_head() -> None:
    """Their own head trains beside the generic model; here theirs was run once more, from the trained generic model."""
    done = work(w := world(FedRoD()), 0, 0, received(w), {})
    moved = done.update.payload["parameters"]
    near(moved["head.weight"], tensor([[0.3381822, -0.1640791], [0.3618178, 0.0640790], [-0.1, 0.5]]))
    near(moved["head.bias"], tensor([0.0056832, 0.1943168, -0.1]))
    near(moved["body.weight"], tensor([[0.9984505, 0.4955763], [-0.5046486, 0.9867289]]))
    own = done.state["own_head"]
    near(own["head.weight"], tensor([[0.0185139, 0.0359942], [-0.0074557, -0.0171976], [-0.0110582, -0.0187966]]))
    near(own["head.bias"], tensor([-0.0075299, 0.0339214, -0.0263916]))


DRIFTS = [  # of two clients with weights 1 and 3, in three rounds
    ([0.3, -0.2, 0.1], [-0.1, 0.1, 0.2]),
    ([0.2, 0.2, -0.2], [-0.2, 0.1, 0.1]),
    ([0.1, 0.1, 0.1], [0.1, 0.2, 0.1]),
]


def server_steps(method: Method, group: str) -> list[Tensor]:
    """The server's model after each round of DRIFTS, from (.5, -1, 2)."""
    site = world(method).server_site(0, "train")
    start = Tensors(w=tensor([0.5, -1.0, 2.0]))
    server: Any = {"parameters": start, ITERATE: start} if isinstance(method, FedExP) else {"parameters": start}
    if hasattr(method, "optimiser"):
        server = method.optimiser.start(server)
    seen = []
    for drifts in DRIFTS:
        server = method.aggregate(site, server, updates(server[group], drifts))
        seen.append(server[group]["w"])
    return seen


def updates(x: Tensors, drifts: Sequence[Sequence[float]]) -> list[Update]:
    moved = [Tensors(w=tensor(drift)) for drift in drifts]
    return [
        Update({"parameters": x + each, "drift": Tensors(square=square_norm(each))}, weight)
        for each, weight in zip(moved, (1.0, 3.0), strict=True)
    ]


def test_fedexp_goes_as_far_as_the_authors_code() -> None:
    """Their epsilon, .0005, counts once for each client of the round. Steps of 1.2403, 1.3761 and 1 times D."""
    theirs = [[0.5, -0.9689922, 2.2170544], [0.3623853, -0.7969739, 2.2514579], [0.4623853, -0.6219739, 2.3514578]]
    for ours, their in zip(server_steps(FedExP(epsilon=2 * 0.0005), ITERATE), theirs, strict=True):
        near(ours, tensor(their))


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (
            FedAdam,
            [[0.5, -0.9974953, 2.0170336], [0.4900497, -0.9829079, 2.0348327], [0.4910376, -0.9532552, 2.0604341]],
        ),
        (
            FedYogi,
            [[0.5, -0.9974985, 2.0169945], [0.4900981, -0.9829633, 2.0347276], [0.4910788, -0.9534773, 2.0601726]],
        ),
        (
            FedAdagrad,
            [[0.5, -0.9763932, 2.0754302], [0.4381966, -0.9095235, 2.0861270], [0.4881966, -0.8452337, 2.1247125]],
        ),
    ],
)
def test_server_optimisers_step_as_fl_benchs(kind: Any, theirs: list[list[float]]) -> None:
    """Their v starts at 0; here theirs was started at tau^2, as the paper does."""
    for ours, their in zip(server_steps(kind(server_lr=0.1, tau=0.05), "parameters"), theirs, strict=True):
        near(ours, tensor(their))


def test_ifca_chooses_trains_and_averages_as_the_authors_code() -> None:
    """Clients 0 and 2 choose the first model, client 1 the second, which has the head's opposite signs."""
    x = torch.cat([X, tensor([[0.5, -1.0], [1.0, 1.0], [-2.0, 0.5], [0.0, 1.5]]), X + 1])
    y = torch.cat([Y, tensor([2, 2, 0, 0]), tensor([1, 1, 0, 0])])
    w = world(IFCA(clusters=2), x, y, clients=3)
    server = received(w)
    first = server["parameters"]
    opposite = Tensors({name: -t if name.startswith("head") else t for name, t in first.items()})
    server = server | {"parameters_1": opposite}
    sent = [work(w, client, 0, server, {}).update for client in range(3)]
    assert [int(update.payload["choice"]["model"].argmax()) for update in sent] == [0, 1, 0]
    server = w.method.aggregate(w.server_site(0, "train"), server, iter(sent))
    heads = [model_number(server, j)["parameters"]["head.weight"] for j in (0, 1)]
    near(heads[0], tensor([[0.3399166, -0.1639626], [0.3834164, 0.0854259], [-0.1233329, 0.4785367]]))
    near(heads[1], tensor([[-0.3208924, 0.2376166], [-0.3992152, -0.1143432], [0.1201076, -0.5232733]]))
    near(
        model_number(server, 1)["parameters"]["body.weight"], tensor([[1.0085745, 0.4972015], [-0.5194669, 1.0106781]])
    )


def test_fedncms_head_is_the_authors() -> None:
    features = tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 2.0], [2.0, 0.5, 1.0], [-1.0, 1.0, 3.0], [0.5, 0.5, 0.0]])
    total = torch.zeros(3, 3).index_add_(0, tensor([0, 1, 1, 2, 0]), features)
    weight, _ = nearest_mean_head(total, tensor([2.0, 2.0, 1.0]), "cosine")
    near(weight[:2], tensor([[0.5070925, 0.8451542, 0.1690308], [0.5494422, -0.1373606, 0.8241634]]))
    near(weight[2], tensor([-0.3015113, 0.3015113, 0.9045340]))
