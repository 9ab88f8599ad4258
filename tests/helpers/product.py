"""f = (h b - 1)^2 / 2: one number for the body, one for the head. The toy of FedBABU, FedPer and FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.world import World
from toys import Scalar


class Product(nn.Module):
    """A body b and a head h of one double each."""

    def __init__(self, b: float, h: float) -> None:
        super().__init__()
        self.body, self.head = Scalar(b), Scalar(h)


def half_square(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """(h b - target)^2 / 2, the target being the sample."""
    error: Tensor = net.head.w * net.body.w - x[:, 0]
    return 0.5 * error.square().mean()


def product(
    method: Method,
    *,
    training: Training | None = None,
    targets: Sequence[float] = (1.0,),
    sizes: Sequence[int] = (),
    start: tuple[float, float] = (0.0, 2.0),
) -> World:
    """A client for each target, of one sample (or `sizes`); lr 0.1, and an epoch is one step."""
    sizes = sizes or [1] * len(targets)
    x = torch.tensor([[t] for t, n in zip(targets, sizes, strict=True) for _ in range(n)], dtype=torch.float64)
    y = torch.zeros(len(x), dtype=torch.int64)
    clients = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    training = training or Training(lr=0.1, batch_size=100)
    net = partial(Product, *start)
    return world_from_tensors(method, training, net, x, y, clients, classes=2, rounds=10, loss=half_square)


def deployed(world: World, client: int, broadcast: Payload, state: Payload) -> tuple[float, float]:
    """(b, h) of the model this client would use."""
    model = world.method.personalise(world.site(client, 0, "evaluate"), broadcast, state)["parameters"]
    return float(model["body.w"]), float(model["head.w"])
