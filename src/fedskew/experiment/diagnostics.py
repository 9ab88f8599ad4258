"""What skew does to a model beyond its accuracy: collapsed features, heads that drift apart."""

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

CLIENTS = 10  # whose heads are compared
EPSILON = 1e-8  # added to variances: a dead feature correlates with nothing


def eigenvalues(features: Tensor) -> Tensor:
    """Of the correlation matrix of features [n, d], largest first; [d], zeros where n <= d leaves none."""
    n, d = features.shape
    x = features.double()
    x = (x - x.mean(0)) / (x.var(0) + EPSILON).sqrt() / (n - 1) ** 0.5
    small = x @ x.T if n < d else x.T @ x  # both have the same non-zero eigenvalues
    values = torch.linalg.eigvalsh(small).clamp(min=0).flip(0)
    return torch.cat([values, values.new_zeros(d - len(values))])


def eigenvalue_spread(features: Tensor, labels: Tensor, top: int = 50) -> float:
    """FedMR's Table 7: (1/n) sum over the `top` eigenvalues of (lambda - their mean)^2, n the batch; mean over classes.

    Large: features of a class move along few directions (collapse). Classes of one sample say nothing.
    """
    groups = [features[labels == c] for c in range(int(labels.max()) + 1)]
    leading = [eigenvalues(group)[:top] for group in groups if len(group) > 1]
    if not leading:
        return 0.0
    return float(torch.stack([(v - v.mean()).square().sum() for v in leading]).mean() / len(labels))


@torch.no_grad()
def feature_collapse(net: Net, data: Data, rng: torch.Generator, *, batch: int = 128, top: int = 50) -> float:
    """`eigenvalue_spread` of a net's features, mean over whole random batches (one smaller if there is none)."""
    net.eval()
    device = next(net.parameters()).device
    order = torch.randperm(len(data), generator=rng)
    whole = order[: len(order) // batch * batch] if len(order) >= batch else order
    spreads = []
    for positions in torch.split(whole, batch):
        x, y = data.take(positions)
        spreads.append(eigenvalue_spread(net.body(x.to(device)).cpu(), y, top))
    return sum(spreads) / len(spreads)


def head_distances(models: Sequence[Payload]) -> Tensor:
    """[models, models]: |w_i - w_j| over the parameters of the heads."""
    if not models:
        return torch.zeros(0, 0)
    heads = [torch.cat([t.flatten().double() for t in m["parameters"].split("head.")[1].values()]) for m in models]
    stacked = torch.stack(heads)
    return torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist")


def diagnose(world: World, server: Payload, store: Store, members: Sequence[int]) -> Diagnostics:
    """How far a finished run's features collapsed and its clients' heads drift apart; None where there is no telling.

    `eigenvalue_spread`: FedMR's Table 7, of the global model on the test set. `head_distance`: mean over pairs of
    clients (the first ten members with data) of |h_i - h_j| after one more round of local training. Nothing is kept.
    """
    with one_thread():
        net, data = global_net(world, server), whole_test(world)
        rng = world.site(-1, world.rounds, "diagnose", Purpose.DIAGNOSE).rng
        spread = feature_collapse(net, data, rng) if world.method.has_global and len(data) else None
        heads = head_distances(drifted(world, server, store, members))
    return Diagnostics(eigenvalue_spread=spread, head_distance=mean_distance(heads), clients=len(heads))


def mean_distance(apart: Tensor) -> float | None:
    """Over pairs, of a symmetric matrix of distances; None where there is no pair."""
    pairs = len(apart) * (len(apart) - 1)
    return float(apart.sum()) / pairs if pairs else None


def whole_test(world: World) -> Data:
    return world.test_set(0, len(world.y_test))


def global_net(world: World, server: Payload) -> Any:
    """The net with the server's model in it."""
    site = world.site(-1, world.rounds, "diagnose", Purpose.DIAGNOSE)
    site.load(world.method.broadcast(server))
    return site.net


def drifted(world: World, server: Payload, store: Store, members: Sequence[int]) -> list[Payload]:
    """The models of up to ten clients after a round of local training from the server's."""
    able = [client for client in members if len(world.train[client])][:CLIENTS]
    broadcast, models = world.method.broadcast(server), []
    for client in able:
        blob = store.get(client)
        done = world.train_client(client, world.rounds - 1, "train", broadcast, decode(blob) if blob else {})
        layers = (world.initial, broadcast, done.update.payload, done.state)
        models.append({group: _laid(group, layers) for group in MODEL})
    return models


def _laid(group: str, payloads: Sequence[Payload]) -> Tensors:
    made = Tensors()
    for payload in payloads:
        made = made | payload.get(group, Tensors())
    return made
