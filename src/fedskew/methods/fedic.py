"""FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated Distillation.

Shang, Lu, Cheung, Wang. ICME 2022. arXiv:2205.00172

Clients are FedAvg's. z_k, f_k are client k's logits and features, S the cohort, D0 the server's public set.
    e_k  = sigmoid(z_k . s + s_0), divided by the sum over S, per sample;  z = sum_{k in S} e_k z_k
    z_cr = logits of FedAvg's model after `steps` of Adam on CE over D0
    z_ec = q (a z + b) + (1 - q) z_cr,  q = sigmoid(v . mean_{k in S} f_k + v_0)
    L    = ld KL(z_ec / T || student / T) + (1 - ld) CE, from FedAvg's model
s, s_0, a, b, v, v_0 are trained on CE over D0 and kept, with Adam's moments, between rounds.
Departure: D0 replaces the unlabelled set too, so both terms of L are of one batch.
Departure: v, v_0 start at 0 (the authors' code: at random).
Departure: Adam starts afresh each round for the two nets.
Departure: augmentation, if clients use it, applies to the student's batches, not to the teachers'.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from fedskew.core.fast.calibration import Frozen
from fedskew.core.losses import imitation
from fedskew.core.method import Method, Paper, Update, mean_of, model_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive
from fedskew.methods._shared.distillation import (
    calibrate,
    calibrated,
    mean_features,
    no_moments,
    on_server,
    predict,
    predict_all,
    student_steps,
    train_model,
    train_student,
)

CALIBRATION, ADAM = "calibration", "adam"  # groups of the server's state


def weighted_logits(c: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """z [n, C] from the clients' logits [n, S, C]."""
    e = logsigmoid(logits @ c["s"] + c["s_0"]).softmax(1)  # sigmoids over their sum, also where all of them are 0
    return (e[:, None] @ logits)[:, 0]


def ensembled(c: Mapping[str, Tensor], logits: Tensor, z_cr: Tensor, features: Tensor) -> Tensor:
    """z_ec [n, C] of the calibration c."""
    return calibrated(c, weighted_logits(c, logits), z_cr, features @ c["v"] + c["v_0"])


@dataclass(frozen=True)
class FEDIC(Method):
    """The server calibrates the clients' ensemble on a balanced public set and distils it into the averaged model."""

    paper = Paper(
        title="FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated Distillation",
        authors="Shang, Lu, Cheung, Wang",
        venue="ICME 2022",
        link="arXiv:2205.00172",
    )
    formula = (
        r"z &= \sum_{k \in S} e_k z_k, \qquad e_k \propto \sigma(z_k \cdot s + s_0) \\ "
        r"z_{ec} &= q \, (a z + b) + (1 - q) \, z_{cr}, \qquad q = \sigma\bigl( v \cdot \underset{k \in "
        r"S}{\mathrm{mean}} \; f_k + v_0 \bigr) \\ "
        r"L &= \lambda \, \mathrm{KL}(z_{ec} / T \,\|\, z_{student} / T) + (1 - \lambda) \, \mathrm{CE} \text{ on } "
        r"D_0"
    )
    terms_off = {"distil_steps": 0}
    sums_only = False
    quick = {"steps": 3, "distil_steps": 3}
    public = True
    weak_where = {
        "iid": "each round ends with training on the public set, which takes the model away from what the clients have "
        "taught it: 5.5 points below FedAvg on the board's task without skew (100 public samples).",
        "mlp two": "with 50 public samples it stays 3.1 points below FedAvg on digits; with 100 samples and 20 clients "
        "it is 4.0 points ahead (the board's t2).",
    }

    ld: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.5, help="Share of the distillation in the student's loss; the rest is cross entropy.", source="the paper"
    )
    T: Positive = setting(
        2.0, help="Temperature of the distillation, without a factor T^2.", source="the authors' code"
    )
    steps: Natural = setting(
        100, help="Steps of the re-trained model (z_cr) and of the calibration.", source="the authors' code"
    )
    distil_steps: Natural | None = setting(
        None,
        help="Steps of the student; 0 gives FedAvg, None: 100, but at most 12.5 passes over the public set.",
        source="the authors' code: 100 steps are 12.5 passes over its 1,000 samples; on small sets chosen on "
        "validation data (results/soundness)",
    )
    lr: Positive = setting(
        0.001,
        help="Learning rate of Adam on the server.",
        source="the authors' code; FedDDC's comparison has 0.002",
        search=(1e-4, 0.01),
    )
    weight_decay: NotNegative = setting(
        2e-4, help="Weight decay of the re-trained model and the student.", source="the authors' code"
    )
    batch: Count = setting(20, help="Batch size of re-training and calibration.", source="the authors' code")
    distil_batch: Count = setting(128, help="Batch size of the student.", source="the authors' code")

    def init_server(self, site: Site) -> Payload:
        C, d = site.classes, site.net.features
        scales = {"s": torch.ones(C), "s_0": torch.zeros(1), "a": torch.ones(C), "b": torch.zeros(C)}
        start = Tensors(scales) | {"v": torch.zeros(d), "v_0": torch.zeros(1)}
        return super().init_server(site) | {CALIBRATION: start, ADAM: no_moments(start)}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # all models are needed at once
        server = server | overlay(server, mean_of(sent))
        if self.distil_steps == 0:
            return server
        w_g, y = model_of(server), site.data.labels
        predictions = predict_all(site, (model_of(update.payload) for update in sent))
        logits, features = torch.stack([v.logits for v in predictions], 1), mean_features(predictions)
        adam = {"optimiser": "adam", "lr": self.lr, "weight_decay": self.weight_decay}
        w_cr = train_model(site, w_g, site.loss, on_server(site, batch_size=self.batch, **adam), self.steps)
        z_cr = predict(site, w_cr).logits

        def loss(c: Mapping[str, Tensor], row: Tensor) -> Tensor:
            return cross_entropy(ensembled(c, logits[row], z_cr[row], features[row]), y[row])

        frozen = Frozen(logits, z_cr, features, y)
        c, moments = calibrate(
            site, server[CALIBRATION], server[ADAM], loss, frozen, lr=self.lr, batch=self.batch, steps=self.steps
        )
        teacher = ensembled(c, logits, z_cr, features)
        training = on_server(site, batch_size=self.distil_batch, **adam)
        count = student_steps(site, self.distil_steps, self.distil_batch)
        student = train_student(site, w_g, teacher, self.distillation_loss, training, count)
        return server | student | {CALIBRATION: c, ADAM: moments}

    def distillation_loss(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        """L of logits [batch, classes]."""
        return self.ld * imitation(student, teacher, self.T) + (1 - self.ld) * cross_entropy(student, y)
