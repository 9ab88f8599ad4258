"""FedDF: Ensemble Distillation for Robust Model Fusion in Federated Learning.

Lin, Kong, Stich, Jaggi. NeurIPS 2020. arXiv:2006.07242

Clients are FedAvg's. The server's student starts at FedAvg's model and minimises, over public data D0,
    KL( softmax(mean_{k in S} z_k) || softmax(student) )
with z_k the logits of client k of the round's S: a plain mean, not by samples. D0's labels are not looked at.
Departure: a fixed number of steps at one lr (the original: up to 10000, lr decaying, ended by validation data).
Departure: teachers see D0 as it is, the student augmented if the clients are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.core.losses import imitation
from fedskew.core.method import Method, Update, mean_of, model_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Count, Natural, Positive
from fedskew.methods._shared.distillation import on_server, taught, view


def averaged(logits: Tensor, average: Literal["logits", "probabilities"]) -> Tensor:
    """The teacher's logits from those of the clients, [S, n, C]; a constant more or less is the same."""
    return logits.mean(0) if average == "logits" else logits.log_softmax(2).logsumexp(0)


@dataclass(frozen=True)
class FedDF(Method):
    public: ClassVar[bool] = True

    steps: Natural = 100  # FedDDC's server steps; 0: FedAvg
    lr: Positive = 0.001  # the original's
    batch: Count = 128  # the original's
    clip: Positive | None = 5.0  # the original's code's
    average: Literal["logits", "probabilities"] = "logits"  # the original's

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # every model is needed at once
        server = server | overlay(server, mean_of(sent))
        if not self.steps:
            return server
        logits = torch.stack([view(site, model_of(update.payload)).logits for update in sent])
        training = on_server(site, optimiser="adam", lr=self.lr, batch_size=self.batch, clip=self.clip)
        teacher = averaged(logits, self.average)
        return server | taught(site, model_of(server), teacher, lesson, training, self.steps)


def lesson(student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    return imitation(student, teacher)
