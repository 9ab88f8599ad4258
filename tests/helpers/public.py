"""A federation whose server has public data, and one round of it, for methods that distil on the server."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedskew.core.method import Method, Update, model_of
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.federation.world import World
from fedskew.methods.fedddc import FedDDC
from toys import digits

TAIL = "public:per_class=4+dirichlet:alpha=0.5,clients=5,min=5"
FEW = FedDDC(I=3, J=2, batch=8, led_batch=16)


def small(method: Method, **options: Any) -> World:
    """The digits with 4 public samples of each class, and a small MLP."""
    return digits(method, **{"hidden": "12", "split": TAIL} | options)


@cache
def arrived() -> tuple[World, Payload, list[Update]]:
    """A world, the server's state before its first round, and what three clients sent."""
    world = small(FEW)
    server = FEW.init_server(world.server_site(0, "init"))
    broadcast = FEW.broadcast(server)
    sent = [FEW.client(world.site(c, 0, "train"), broadcast, {})[0] for c in (0, 2, 4)]
    return world, server, sent


def server_site() -> Site:
    return arrived()[0].server_site(0, "train")


def after(method: Method) -> Payload:
    """The server's state after it has aggregated what arrived."""
    _, server, sent = arrived()
    return method.aggregate(server_site(), method.init_server(server_site()) | model_of(server), iter(sent))
