"""FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated Distillation.

Shang, Lu, Cheung, Wang. ICME 2022. arXiv:2205.00172

Clients are FedAvg's. z_k, f_k are client k's logits and features, S the clients of a round, D0 the server's public set.
    e_k  = sigmoid(z_k . s + s_0), over their sum in S, sample by sample;  z = sum_{k in S} e_k z_k
    z_cr = logits of FedAvg's model after `steps` of Adam on CE over D0
    z_ec = q (a z + b) + (1 - q) z_cr,  q = sigmoid(v . mean_{k in S} f_k + v_0)
    L    = ld KL(z_ec / T || student / T) + (1 - ld) CE, from FedAvg's model
s, s_0, a, b, v, v_0 are trained on CE over D0 and kept, with Adam's moments, between rounds.
Departure: D0 takes the place of the unlabelled set too, so both terms of L are of one batch.
Departure: v, v_0 start at 0 (the code draws them); Adam starts anew each round for the two nets.
Departure: teachers see D0 as it is, the student augmented if the clients are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.core.losses import imitation
from fedskew.core.method import Method, Update, mean_of, model_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive
from fedskew.methods._shared.distillation import (
    calibrate,
    calibrated,
    mean_features,
    no_moments,
    on_server,
    taught,
    trained,
    view,
)

CALIBRATION, ADAM = "calibration", "adam"  # groups of the server's state


def weighted(c: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """z [n, C] from the clients' logits [n, S, C]."""
    e = (logits @ c["s"] + c["s_0"]).sigmoid()
    return ((e / e.sum(1, keepdim=True))[:, None] @ logits)[:, 0]


def ensembled(c: Mapping[str, Tensor], logits: Tensor, z_cr: Tensor, features: Tensor) -> Tensor:
    """z_ec."""
    return calibrated(c, weighted(c, logits), z_cr, features @ c["v"] + c["v_0"])


@dataclass(frozen=True)
class FEDIC(Method):
    public: ClassVar[bool] = True

    ld: Annotated[float, Meta(ge=0, le=1)] = 0.5  # the original's
    T: Positive = 2.0  # the original's code's, without T^2
    steps: Natural = 100  # the original's code's, of z_cr and of the calibration
    distil_steps: Natural = 100  # the original's code's; 0: FedAvg
    lr: Positive = 0.001  # the original's code's; FedDDC has 0.002
    weight_decay: NotNegative = 2e-4  # the original's code's, of the two nets
    batch: Count = 20  # the original's code's
    distil_batch: Count = 128  # the original's code's

    def init_server(self, site: Site) -> Payload:
        C, d = site.classes, site.net.features
        scales = {"s": torch.ones(C), "s_0": torch.zeros(1), "a": torch.ones(C), "b": torch.zeros(C)}
        start = Tensors(scales) | {"v": torch.zeros(d), "v_0": torch.zeros(1)}
        return super().init_server(site) | {CALIBRATION: start, ADAM: no_moments(start)}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # every model is needed at once
        server = server | overlay(server, mean_of(sent))
        if not self.distil_steps:
            return server
        w_g, y = model_of(server), site.data.labels
        views = [view(site, model_of(update.payload)) for update in sent]
        logits, features = torch.stack([v.logits for v in views], 1), mean_features(views)
        adam = {"optimiser": "adam", "lr": self.lr, "weight_decay": self.weight_decay}
        w_cr = trained(site, w_g, site.loss, on_server(site, batch_size=self.batch, **adam), self.steps)
        z_cr = view(site, w_cr).logits

        def loss(c: Mapping[str, Tensor], row: Tensor) -> Tensor:
            return cross_entropy(ensembled(c, logits[row], z_cr[row], features[row]), y[row])

        c, moments = calibrate(
            site, server[CALIBRATION], server[ADAM], loss, lr=self.lr, batch=self.batch, steps=self.steps
        )
        teacher = ensembled(c, logits, z_cr, features)
        training = on_server(site, batch_size=self.distil_batch, **adam)
        student = taught(site, w_g, teacher, self.lesson, training, self.distil_steps)
        return server | student | {CALIBRATION: c, ADAM: moments}

    def lesson(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        return self.ld * imitation(student, teacher, self.T) + (1 - self.ld) * cross_entropy(student, y)
