"""Effects of skewed data on a model besides its accuracy: collapsed features, and client heads that drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedskew.core.method import MODEL
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.seeding import Purpose, one_thread
from fedskew.core.tensors import Payload, Tensors
from fedskew.experiment.result import Diagnostics
from fedskew.federation.store import Store
from fedskew.federation.wire import decode
from fedskew.federation.world import World

CLIENTS = 10  # at most so many clients' heads are compared
EPSILON = 1e-8  # added to variances, so that a constant feature correlates with nothing


def eigenvalues(features: Tensor) -> Tensor:
    """Eigenvalues [d] of the correlation matrix of features [n, d], largest first; at most n - 1 are not zero."""
    n, d = features.shape
    x = features.double()
    x = (x - x.mean(0)) / (x.var(0) + EPSILON).sqrt() / (n - 1) ** 0.5
    small = x @ x.T if n < d else x.T @ x  # both have the same non-zero eigenvalues
    values = torch.linalg.eigvalsh(small).clamp(min=0).flip(0)
    return torch.cat([values, values.new_zeros(d - len(values))])


def eigenvalue_spread(features: Tensor, labels: Tensor, top: int = 50) -> float:
    """(1/n) sum over the `top` eigenvalues of (lambda - their mean)^2, averaged over classes; n is the batch size.

    The measure of FedMR's Table 7. A large value means that the features of a class vary along few directions only
    (collapse). Classes with one sample are left out; 0 if there is no other class.
    """
    groups = [features[labels == c] for c in range(int(labels.max()) + 1)]
    leading = [eigenvalues(group)[:top] for group in groups if len(group) > 1]
    if not leading:
        return 0.0
    return float(torch.stack([(v - v.mean()).square().sum() for v in leading]).mean() / len(labels))


@torch.no_grad()
def feature_collapse(net: Net, data: Data, rng: torch.Generator, *, batch: int = 128, top: int = 50) -> float:
    """Mean `eigenvalue_spread` of a net's features over random batches of `batch` samples.

    Samples that do not fill a batch are left out, unless there are fewer than `batch` in all.
    """
    net.eval()
    device = next(net.parameters()).device
    order = torch.randperm(len(data), generator=rng)
    used = order[: len(order) // batch * batch] if len(order) >= batch else order
    spreads = []
    for positions in torch.split(used, batch):
        x, y = data.take(positions)
        spreads.append(eigenvalue_spread(net.body(x.to(device)).cpu(), y, top))
    return sum(spreads) / len(spreads)


def head_distances(models: Sequence[Payload]) -> Tensor:
    """Euclidean distances |w_i - w_j| between the parameters of the models' heads: [models, models]."""
    if not models:
        return torch.zeros(0, 0)
    heads = [torch.cat([t.flatten().double() for t in m["parameters"].split("head.")[1].values()]) for m in models]
    stacked = torch.stack(heads)
    return torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist")


def diagnose(world: World, server: Payload, store: Store, members: Sequence[int]) -> Diagnostics:
    """The diagnostics of a finished run: feature collapse and distance of the clients' heads.

    `eigenvalue_spread` is that of the global model on the server's test set; None if there is no global model or no
    test set. `head_distance` is the mean over pairs of clients (the first ten members with data) of |h_i - h_j| after
    one more round of local training, which changes no state; None if there is no pair.
    """
    with one_thread():
        net, data = global_net(world, server), whole_test(world)
        rng = world.site(-1, world.rounds, "diagnose", Purpose.DIAGNOSE).rng
        spread = feature_collapse(net, data, rng) if world.method.has_global and len(data) else None
        heads = head_distances(drifted(world, server, store, members))
    return Diagnostics(eigenvalue_spread=spread, head_distance=mean_distance(heads), clients=len(heads))


def mean_distance(apart: Tensor) -> float | None:
    """The mean over pairs of a symmetric matrix of distances; None if there is no pair."""
    pairs = len(apart) * (len(apart) - 1)
    return float(apart.sum()) / pairs if pairs else None


def whole_test(world: World) -> Data:
    """The server's test set."""
    return world.test_set(0, len(world.y_test))


def global_net(world: World, server: Payload) -> Any:
    """The net with the parameters of the global model."""
    site = world.site(-1, world.rounds, "diagnose", Purpose.DIAGNOSE)
    site.load(world.method.broadcast(server))
    return site.net


def drifted(world: World, server: Payload, store: Store, members: Sequence[int]) -> list[Payload]:
    """The models of up to ten clients after a round of local training that starts from the server's broadcast."""
    broadcast, models = world.method.broadcast(server), []
    for client in drifting_clients(world, members):
        blob = store.get(client)
        done = world.train_client(client, world.rounds - 1, "train", broadcast, decode(blob) if blob else {})
        payloads = (world.initial, broadcast, done.update.payload, done.state)
        models.append({group: _overlay(group, payloads) for group in MODEL})
    return models


def drifting_clients(world: World, members: Sequence[int]) -> list[int]:
    """The clients whose heads are compared: the first ten that have training samples."""
    return [client for client in members if len(world.train[client])][:CLIENTS]


def _overlay(group: str, payloads: Sequence[Payload]) -> Tensors:
    """The tensors of a group; where several payloads have one of the same name, the last counts."""
    tensors = Tensors()
    for payload in payloads:
        tensors = tensors | payload.get(group, Tensors())
    return tensors
