"""Drift of a finished run, computed from its saved models: distances of heads, collapse and t-SNE of features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedskew.core.seeding import Purpose, one_thread
from fedskew.experiment.assemble import assemble
from fedskew.experiment.diagnostics import (
    drifted,
    drifting_clients,
    feature_collapse,
    global_net,
    head_distances,
    whole_test,
)
from fedskew.experiment.run_directory import SavedRun

POINTS = 400  # test samples in the t-SNE plot
LEAST = 10  # test samples; with fewer, t-SNE shows nothing


@dataclass(frozen=True)
class Drift:
    """How far the clients' heads drift apart, and how the global model's features spread."""

    clients: list[int]  # whose heads are compared
    heads: Tensor  # [clients, clients], distances of the heads after one more round of local training
    eigenvalue_spread: float | None  # None without a global model or test set
    points: npt.NDArray[np.float64] | None  # [samples, 2], t-SNE of the global model's features
    labels: npt.NDArray[np.int64]  # [samples], the classes of the points


def drift_of(run: SavedRun, data_dir: Path | None) -> Drift:
    """The drift of a finished run; its data are loaded from `data_dir` (None for the default folder)."""
    setting = assemble(run.experiment, data_dir=data_dir)
    world, server = setting.world, run.server()
    with one_thread():
        clients = drifting_clients(world, setting.members)
        heads = head_distances(drifted(world, server, run.store(), setting.members))
        data = whole_test(world)
        if not world.method.has_global or len(data) < LEAST:
            return Drift(clients, heads, None, None, np.empty(0, np.int64))
        site = world.site(-1, world.rounds, "diagnose", Purpose.DIAGNOSE)
        net = global_net(world, server)
        spread = feature_collapse(net, data, site.rng)
        some = data.part(torch.randperm(len(data), generator=site.rng)[:POINTS])
        features = site.infer(net.body, some).flatten(1).numpy()
    with threadpool_limits(1):  # the same picture on any machine
        plane = TSNE(perplexity=min(30.0, len(features) / 4), init="pca", random_state=0).fit_transform(features)
    return Drift(clients, heads, spread, plane.astype(np.float64), some.labels.numpy())
