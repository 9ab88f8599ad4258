"""How skewed the clients of an experiment are, in the field's words: labels, sizes and features."""

from __future__ import annotations

import numpy as np
import torch

from fedskew.core.net import outputs
from fedskew.core.seeding import one_thread
from fedskew.data.split.skew import feature_skew, skew
from fedskew.experiment.assemble import Assembled
from fedskew.federation.world import World

CLIENTS, SAMPLES = 50, 40  # of at most so many clients, at most so many training samples each are put through the net


def skew_figures(assembled: Assembled) -> dict[str, float | None]:
    """The figures of `Skew.summary`, and `features`: how much samples of one class differ between clients.

    See `feature_skew`; features are those of the initial net. None if it cannot be computed.
    """
    found = skew(assembled.partition, assembled.data.y_train, assembled.data.classes)
    members = [] if assembled.world.method.pooled else list(assembled.members)
    return {**found.summary(), "features": initial_feature_skew(assembled.world, members)}


@torch.no_grad()
def initial_feature_skew(world: World, clients: list[int]) -> float | None:
    """`feature_skew` of the clients' training samples under the initial net."""
    parts = []
    chosen = [c for c in clients if len(world.train[c])]
    with one_thread():
        for client in chosen[:: -(-len(chosen) // CLIENTS) or 1]:
            index = world.train[client]
            data = world.pool(index[:: -(-len(index) // SAMPLES)], client)
            site = world.site(client, 0, "evaluate")
            site.load(world.initial)
            x, y = data.take(torch.arange(len(data)))
            features = outputs(site.net, site.net.body, x.to(world.device), batch_statistics=False).cpu()
            parts.append((features.double().numpy(), y.numpy(), np.full(len(y), client)))
    if len(parts) < 2:
        return None
    z, labels, owners = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return feature_skew(z, labels, owners) if np.isfinite(z).all() else None
