"""FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning.

Chen, Chao. ICLR 2021. arXiv:2009.01974

Clients are FedAvg's. S are those of a round, p_i their shares of the samples, D0 the server's public set.
    gaussian:   w ~ N(mu, scale^2 diag(var)),  mu = sum_i p_i w_i,  var = sum_i p_i (w_i - mu)^2
    dirichlet:  w = sum_i g_i w_i,  g ~ Dir(alpha)
    p_T(x) = mean of softmax(F(x; w)) over M such draws, the clients and mu; sharpened: p_T^(1/T) / sum p_T^(1/T)
    the student, from mu, minimises KL(p_T || student) over D0; what is sent is the mean of its last models (SWA)
D0's labels are not looked at.
Departure: drawn models take mu's batch-norm statistics.
Departure: SWA takes the student after each of its last epochs, momentum anew in each (the code: every 25 steps).
Departure: KL is a mean over samples (the code divides by the classes too); w is drawn as printed (the code draws unit
differences to the round's start and stretches them to their mean length).
Departure: teachers see D0 as it is, the student augmented if the clients are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedskew.core.losses import imitation
from fedskew.core.method import Method, Update, mean_of, model_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors, weighted_mean
from fedskew.core.training import Count, Natural, NotNegative, Positive, Share
from fedskew.methods._shared.distillation import on_server, taught, view


def variance(sent: Sequence[Update], mu: Tensors) -> Tensors:
    """var, element by element."""
    apart = ((update.payload["parameters"] - mu, update.weight) for update in sent)
    return weighted_mean((Tensors({name: t.square() for name, t in d.items()}), weight) for d, weight in apart)


def gaussian(mu: Tensors, var: Tensors, scale: float, rng: torch.Generator) -> Tensors:
    eps = {name: torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in mu.items()}
    return Tensors({name: t + scale * var[name].sqrt() * eps[name] for name, t in mu.items()})


def dirichlet(sent: Sequence[Update], alpha: float, rng: torch.Generator) -> Tensors:
    seed = int(torch.randint(1 << 62, (), generator=rng))  # torch draws no Dirichlet from a generator of one's own
    shares = np.random.default_rng(seed).dirichlet([alpha] * len(sent)).tolist()
    return weighted_mean((update.payload["parameters"], share) for update, share in zip(sent, shares, strict=True))


def sharpened(logits: Sequence[Tensor], T: float) -> Tensor:
    """Logits of the teacher from those of the ensemble's members, [n, C] each."""
    mixed = torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0)  # log p_T and a constant
    return mixed / T


@dataclass(frozen=True)
class FedBE(Method):
    public: ClassVar[bool] = True

    posterior: Literal["gaussian", "dirichlet"] = "gaussian"  # the original's
    M: Natural = 10  # the original's
    scale: NotNegative = 0.1  # the original's code's; 1 as printed
    alpha: Positive = 1.0  # ours
    T: Positive = 0.5  # the original's code's; 1: nothing is sharpened
    epochs: Natural = 20  # the original's code's; 0: FedAvg
    swa: Count = 10  # ours, epochs at the end whose models are averaged; 1: no SWA
    lr: Positive = 0.001  # the original's code's
    momentum: Share = 0.9  # the original's code's
    weight_decay: NotNegative = 1e-5  # the original's code's
    batch: Count = 128  # the original's code's

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # every model is needed at once
        server = server | overlay(server, mean_of(sent))
        if not self.epochs:
            return server
        student = model_of(server)
        members = chain([student], (model_of(update.payload) for update in sent), self.draws(site, student, sent))
        teacher = sharpened([view(site, model).logits for model in members], self.T)
        settings = {"momentum": self.momentum, "weight_decay": self.weight_decay, "batch_size": self.batch}
        training = on_server(site, lr=self.lr, epochs=1, **settings)
        last: list[Payload] = []
        for _ in range(self.epochs):
            student = taught(site, student, teacher, lesson, training)
            last = [*last, student][-self.swa :]
        return server | mean_of(Update(model, 1.0) for model in last)

    def draws(self, site: Site, average: Payload, sent: Sequence[Update]) -> Iterable[Payload]:
        """M models of the posterior, one at a time."""
        mu = average["parameters"]
        var = variance(sent, mu)
        for _ in range(self.M):
            drawn = (
                gaussian(mu, var, self.scale, site.rng)
                if self.posterior == "gaussian"
                else dirichlet(sent, self.alpha, site.rng)
            )
            yield average | {"parameters": drawn}


def lesson(student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    return imitation(student, teacher)
