"""The server's step of FedAdam, FedYogi and FedAdagrad: they differ in the second moment only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from fedskew.core.method import Update, mean_of, overlay
from fedskew.core.tensors import Payload, Tensors

MOMENT, SECOND = "moment", "second_moment"  # groups of the server's payload: m and v


class AdaptiveStep(NamedTuple):
    """x <- x + lr m / (sqrt(v) + tau), with m <- beta1 m + (1 - beta1) D and v <- second(v, D^2)."""

    lr: float
    beta1: float
    tau: float

    def start(self, server: Payload) -> Payload:
        """The server's payload with m = 0 and v = tau^2."""
        m = server["parameters"].zeros()
        return server | {MOMENT: m, SECOND: Tensors({name: t + self.tau**2 for name, t in m.items()})}

    def take(self, server: Payload, updates: Iterable[Update], second: Callable[[Tensor, Tensor], Tensor]) -> Payload:
        """The server's payload after one round. D is the clients' weighted mean minus x; buffers are averaged."""
        x, fresh = server["parameters"], mean_of(updates)
        D = fresh["parameters"] - x
        m = server[MOMENT] * self.beta1 + D * (1 - self.beta1)
        v = Tensors({name: second(t, D[name].square()) for name, t in server[SECOND].items()})
        step = Tensors({name: t / (v[name].sqrt() + self.tau) for name, t in m.items()})
        return server | overlay(server, fresh) | {"parameters": x + step * self.lr, MOMENT: m, SECOND: v}
