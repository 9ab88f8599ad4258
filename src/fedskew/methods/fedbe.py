"""FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning.

Chen, Chao. ICLR 2021. arXiv:2009.01974

Clients are FedAvg's. S is the cohort, p_i a client's share of its samples, D0 the server's public set.
    gaussian:   w ~ N(mu, scale^2 diag(var)),  mu = sum_i p_i w_i,  var = sum_i p_i (w_i - mu)^2
    dirichlet:  w = sum_i g_i w_i,  g ~ Dir(alpha)
    p_T(x) = mean of softmax(F(x; w)) over M such draws, the clients and mu; sharpened: p_T^(1/T) / sum p_T^(1/T)
    the student starts at mu and minimises KL(p_T || student) over D0; the mean of its last models is sent (SWA)
D0's labels are not used.
Departure: drawn models have the batch-norm statistics of mu.
Departure: SWA averages the student after each of its last epochs, each with new momentum (the code: every 25 steps).
Departure: KL is a mean over samples (the code also divides by the number of classes).
Departure: w is drawn as printed (the code draws unit differences to the round's start and scales them to mean length).
Departure: augmentation, if clients use it, applies to the student's batches, not to the teachers'.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedskew.core.method import Method, Paper, Update, mean_of, model_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors, weighted_mean
from fedskew.core.training import Count, Natural, NotNegative, Positive, Share
from fedskew.methods._shared.distillation import imitate, on_server, predict_all, train_student


def weight_variance(sent: Sequence[Update], mu: Tensors) -> Tensors:
    """var of each element of the parameters."""
    apart = ((update.payload["parameters"] - mu, update.weight) for update in sent)
    return weighted_mean((Tensors({name: t.square() for name, t in d.items()}), weight) for d, weight in apart)


def draw_gaussian(mu: Tensors, var: Tensors, scale: float, rng: torch.Generator) -> Tensors:
    """One draw of the Gaussian."""
    eps = {name: torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in mu.items()}
    return Tensors({name: t + scale * var[name].sqrt() * eps[name] for name, t in mu.items()})


def draw_dirichlet(sent: Sequence[Update], alpha: float, rng: torch.Generator) -> Tensors:
    """One draw of the Dirichlet mixture."""
    seed = int(torch.randint(1 << 62, (), generator=rng))  # torch's Dirichlet takes no generator
    shares = np.random.default_rng(seed).dirichlet([alpha] * len(sent)).tolist()
    return weighted_mean((update.payload["parameters"], share) for update, share in zip(sent, shares, strict=True))


def sharpened(logits: Sequence[Tensor], T: float) -> Tensor:
    """Logits of the sharpened teacher, up to a constant, from those of the ensemble's members, [n, C] each."""
    mixed = torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0)  # log p_T plus a constant
    return mixed / T


@dataclass(frozen=True)
class FedBE(Method):
    """The server distils an ensemble of clients and models drawn around their mean into the averaged model."""

    paper = Paper(
        title="FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning",
        authors="Chen, Chao",
        venue="ICLR 2021",
        link="arXiv:2009.01974",
    )
    formula = (
        r"w_m &\sim \mathcal{N}(\mu, s^2 \, \mathrm{diag}\, \sigma^2), \qquad \mu = \sum_{i \in S} p_i w_i, "
        r"\qquad \sigma^2 = \sum_{i \in S} p_i (w_i - \mu)^2 \\ "
        r"p_T(z) &= \text{mean of } \mathrm{softmax}(F(z; w)) \text{ over the } w_m, \text{ the } w_i \text{ and } "
        r"\mu \\ "
        r"x &\leftarrow \underset{w}{\mathrm{argmin}} \; \mathrm{KL}\bigl( p_T \,\|\, \mathrm{softmax}(F(\cdot; w)) "
        r"\bigr) \text{ on } D_0"
    )
    terms_off = {"epochs": 0}
    sums_only = False
    quick = {"M": 2, "epochs": 2}
    public = True

    posterior: Literal["gaussian", "dirichlet"] = setting(
        "gaussian", help="Distribution the ensemble's models are drawn from.", source="the paper"
    )
    M: Natural = setting(10, help="Models drawn; 0: the ensemble is the clients and their mean.", source="the paper")
    scale: NotNegative = setting(
        0.1, help="Factor of the Gaussian's standard deviation.", source="the authors' code; 1 as printed"
    )
    alpha: Positive = setting(1.0, help="Concentration of the Dirichlet distribution.", source="our choice")
    T: Positive = setting(
        0.5, help="Temperature that sharpens the teacher; 1: not sharpened.", source="the authors' code"
    )
    epochs: Natural = setting(20, help="Epochs over the public set; 0 gives FedAvg.", source="the authors' code")
    swa: Count = setting(10, help="Last epochs whose models are averaged; 1: no averaging.", source="our choice")
    lr: Positive = setting(0.001, help="Learning rate on the server.", source="the authors' code", search=(1e-4, 0.01))
    momentum: Share = setting(0.9, help="Momentum on the server.", source="the authors' code")
    weight_decay: NotNegative = setting(1e-5, help="Weight decay on the server.", source="the authors' code")
    batch: Count = setting(128, help="Batch size on the server.", source="the authors' code")

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # all models are needed at once
        server = server | overlay(server, mean_of(sent))
        if not self.epochs:
            return server
        student = model_of(server)
        members = chain([student], (model_of(update.payload) for update in sent), self.draws(site, student, sent))
        teacher = sharpened([made.logits for made in predict_all(site, members)], self.T)
        settings = {"momentum": self.momentum, "weight_decay": self.weight_decay, "batch_size": self.batch}
        training = on_server(site, lr=self.lr, epochs=1, **settings)
        last: list[Payload] = []
        for _ in range(self.epochs):
            student = train_student(site, student, teacher, imitate, training)
            last = [*last, student][-self.swa :]
        return server | mean_of(Update(model, 1.0) for model in last)

    def draws(self, site: Site, averaged: Payload, sent: Sequence[Update]) -> Iterable[Payload]:
        """M models drawn from the posterior, one at a time."""
        mu = averaged["parameters"]
        var = weight_variance(sent, mu)
        for _ in range(self.M):
            drawn = (
                draw_gaussian(mu, var, self.scale, site.rng)
                if self.posterior == "gaussian"
                else draw_dirichlet(sent, self.alpha, site.rng)
            )
            yield averaged | {"parameters": drawn}
