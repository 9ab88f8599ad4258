"""FedDDC: Federated Learning on Non-IID and Long-tailed Data via Dual-decoupling.

Wang, Li, Li, Hu, Wang. Frontiers of Information Technology & Electronic Engineering 2024. doi:10.1631/FITEE.2300284

Clients are FedAvg's. S is the cohort, F(x; w) are logits, f(x; w) features, D0 is the server's public set.
    Eq. 2:       w_g  = sum_{k in S} n_k / n w_k
    Eq. 3 to 8:  R_k  = U_k / L_k;  L_k mean cross entropy, U_k mean logit of the target class, of w_k on D0
    Eq. 9, 10:   w_tl = sum_{k in S} Q_k w_k,  Q = softmax(R)                            (TLCR)
    Eq. 11:      w_cr = w_g after I steps of Adam on CE over D0                          (cRB)
    Eq. 12, 13:  z_tl = a F(x; w_tl) + b,  z_cr = F(x; w_cr)
    Eq. 14, 15:  z_ec = s z_tl + (1 - s) z_cr,  s = sigmoid(v . g(x))                    (EC)
    Eq. 16:      g(x) = (1/|S| sum_{k in S} f(x; w_k)) * f(x; w_cr), element by element
    Eq. 21, 22:  L    = lam CE + (1 - lam) (alpha TCKD + beta NCKD), teacher z_ec        (LED)
    Eq. 23:      w_g after J steps of Adam on L over D0 is sent
Tables 2 to 4: (a) dfl=none,ec=false,led=false; (b) ec=false,led=false; (c) dfl=none,led=false; (d) led=false;
(e) ec=false; (f) dfl=none; (g) as it is; (h) dfl=tlcr,ec=false,led=false; (i) dfl=crb,ec=false,led=false;
Traditional-KD: kd=traditional. The control, FedAvg fine-tuned on D0: lam=1.
Without LED, w_g is sent and the ensemble is evaluated beside it; where it is a single model (h, i), that model is sent.
Without EC, the teacher is the sum of logits. A model that DFL does not make is replaced by w_g.
Reading: sums run over S; I counts steps of cRB; TLCR is done once a round; w_tl is the whole model.
Reading: a, b, v are trained on CE over D0 by I steps of Adam, kept with its moments between rounds, as in FEDIC's code.
Reading: the paper's split is dirichlet with cap=false (the text names no cap); FEDIC's code has grouped-equal.
Departure: exp is added to the denominators of Eq. 17, where it is missing. L_k is at least 1e-8.
Departure: J is 100 only if D0 has about as many samples as the paper's 1,000; on fewer LED would overfit.
Departure: augmentation, if clients use it, applies to the student's batches, not to the teachers'.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fedskew.core.fast.calibration import Frozen
from fedskew.core.losses import decoupled, imitation
from fedskew.core.method import Method, Paper, Update, mean_of, model_of, overlay
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive, Training
from fedskew.methods._shared.distillation import (
    Predictions,
    calibrate,
    calibrated,
    mean_features,
    no_moments,
    on_server,
    predict,
    predict_all,
    stack_models,
    student_steps,
    train_model,
    train_student,
    unstack_models,
)

CALIBRATION, ADAM = "calibration", "adam"  # groups of the server's payload
TEAM, CLIENTS = "team", "clients"  # groups that hold the models of the ensemble
Form = Literal["literal", "signed"]


def target_loss(logits: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """U and L of each client, [K], from logits [K, n, C]; `signed` subtracts the mean of a sample's logits for U."""
    z, rows = logits.double(), torch.arange(len(y))
    L = z.logsumexp(2) - z[:, rows, y]
    U = (z - z.mean(2, keepdim=True) if form == "signed" else z)[:, rows, y]
    return U.mean(1), L.mean(1).clamp(min=1e-8)


def confidence(U: Tensor, L: Tensor, form: Form, temperature: float = 1.0) -> Tensor:
    """Q [K]. Where U < 0, R = U / L (`literal`) prefers the larger loss; `signed` uses U L there."""
    R = U / L if form == "literal" else torch.where(U < 0, U * L, U / L)
    return (R / temperature).softmax(0)


class Inputs(NamedTuple):
    """What the ensemble's logits are computed from, one row per sample."""

    z_tl: Tensor  # F(x; w_tl), [n, C]
    z_cr: Tensor  # [n, C]
    g: Tensor  # [n, d]


def ensembled(c: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """z_ec [n, C] of the calibration c."""
    return calibrated(c, inputs.z_tl, inputs.z_cr, inputs.g @ c["v"])


@dataclass(frozen=True)
class FedDDC(Method):
    """The server re-weights and re-trains models on a public set, combines them and distils them into one."""

    paper = Paper(
        title="Federated Learning on Non-IID and Long-tailed Data via Dual-decoupling",
        authors="Wang, Li, Li, Hu, Wang",
        venue="Frontiers of Information Technology & Electronic Engineering 2024",
        link="doi:10.1631/FITEE.2300284",
    )
    formula = (
        r"w_{tl} &= \sum_{k \in S} Q_k w_k, \qquad Q = \mathrm{softmax}(U_k / L_k) \\ "
        r"w_{cr} &= w_g \text{ after } I \text{ steps on } \mathrm{CE} \text{ over } D_0 \\ "
        r"z_{ec} &= s \, z_{tl} + (1 - s) \, z_{cr}, \qquad s = \sigma(v \cdot g(x)) \\ "
        r"L &= \lambda \, \mathrm{CE} + (1 - \lambda)(\alpha \, \mathrm{TCKD} + \beta \, \mathrm{NCKD}), "
        r"\qquad \text{teacher } z_{ec}"
    )
    terms_off = {"J": 0}
    sums_only = False
    quick = {"I": 3, "J": 3}
    public = True
    weak_where = {
        "iid": "each round ends with training on the public set, which takes the model away from what the clients have "
        "taught it: 74.6 % on the board's task without skew (100 public samples), FedAvg 81.3."
    }

    dfl: Literal["both", "tlcr", "crb", "none"] = setting(
        "both", help="Models made beside w_g: w_tl (tlcr), w_cr (crb), both or none.", source="the paper"
    )
    ec: bool = setting(
        True, help="Calibrate the ensemble (EC); False: the teacher is a sum of logits.", source="the paper"
    )
    led: bool = setting(
        True, help="Distil into the model that is sent (LED); False: evaluate the ensemble.", source="the paper"
    )
    tlcr: Form = setting(
        "literal",
        help="R_k: literal, U / L as printed; signed, also sound for negative logits.",
        source="the paper; signed is ours",
    )
    tlcr_temp: Positive = setting(1.0, help="Divides R before the softmax of Eq. 10.", source="the paper")
    crb_scope: Literal["all", "head"] = setting(
        "all", help="What cRB trains: the whole model, or the head.", source="the paper's Eq. 11; its text says head"
    )
    unit_gate: bool = setting(
        False, help="True: the gate sees g / |g|, so that it cannot saturate.", source="the paper; True is ours"
    )
    kd: Literal["dkd", "traditional"] = setting(
        "dkd", help="Distillation: decoupled, or KL(teacher || student).", source="the paper"
    )
    lam: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.5, help="lambda, the share of cross entropy in LED; 1: fine-tuning on D0 alone.", source="the paper"
    )
    alpha: NotNegative = setting(1.0, help="Weight of TCKD.", source="the paper")
    beta: NotNegative = setting(2.0, help="Weight of NCKD.", source="the paper")
    T: Positive = setting(1.0, help="Temperature of the distillation, with a factor T^2.", source="the paper")
    I: Natural = setting(100, help="Steps of cRB and of the calibration.", source="the paper")
    J: Natural | None = setting(
        None,
        help="Steps of LED; 0 gives FedAvg, None: 100, but at most 12.5 passes over D0.",
        source="the paper: 100 steps are 12.5 passes over its D0; on small ones chosen on validation data "
        "(results/soundness)",
    )
    lr: Positive = setting(0.002, help="Learning rate of Adam on the server.", source="the paper", search=(2e-4, 0.02))
    weight_decay: NotNegative = setting(2e-4, help="Weight decay of cRB and LED.", source="FEDIC's code")
    batch: Count = setting(20, help="Batch size of cRB and of the calibration.", source="FEDIC's code")
    led_batch: Count = setting(128, help="Batch size of LED.", source="FEDIC's code")

    @property
    def reweights(self) -> bool:
        """Whether w_tl is made (TLCR)."""
        return self.dfl in ("both", "tlcr")

    @property
    def rebalances(self) -> bool:
        """Whether w_cr is made (cRB)."""
        return self.dfl in ("both", "crb")

    @property
    def ensembles(self) -> bool:
        """Whether an ensemble of several models is evaluated beside w_g."""
        return not self.led and (self.ec or self.dfl == "both")

    @property
    def teaches(self) -> bool:
        """Whether the models of the ensemble are needed in this configuration."""
        return (self.J != 0 and self.lam < 1) if self.led else (self.ec or self.dfl != "none")

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if not self.ec:
            return server
        start = Tensors(a=torch.ones(site.classes), b=torch.zeros(site.classes), v=torch.zeros(site.net.features))
        return server | {CALIBRATION: start, ADAM: no_moments(start)}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # all models are needed at once
        server = server | overlay(server, mean_of(sent))
        w_g, teacher = model_of(server), None
        if self.teaches:
            clients = [model_of(update.payload) for update in sent]
            predictions = predict_all(site, clients) if self.ec or self.reweights else []
            w_tl = self.reweighted(site, sent, predictions) if self.reweights else w_g
            w_cr = self.rebalanced(site, w_g) if self.rebalances else w_g
            if not self.led and not self.ensembles:
                return server | (w_tl if self.reweights else w_cr)
            inputs = self.inputs(site, w_tl, w_cr, predictions)
            if self.ec:
                server = server | self.tuned(site, server, inputs)
            if self.ensembles:
                return server | stack_models(TEAM, [w_tl, w_cr]) | (stack_models(CLIENTS, clients) if self.ec else {})
            teacher = self.combined(inputs, server)
        return server | self.distilled(site, w_g, teacher) if self.led else server

    def reweighted(self, site: Site, sent: Sequence[Update], predictions: Sequence[Predictions]) -> Payload:
        """w_tl (Eq. 9)."""
        U, L = target_loss(torch.stack([v.logits for v in predictions]), site.data.labels, self.tlcr)
        Q = confidence(U, L, self.tlcr, self.tlcr_temp).tolist()
        return mean_of(replace(update, weight=q) for update, q in zip(sent, Q, strict=True))

    def rebalanced(self, site: Site, w_g: Payload) -> Payload:
        """w_cr (Eq. 11)."""
        scope = "head." if self.crb_scope == "head" else ""
        return train_model(site, w_g, site.loss, self.adam(site, self.batch), self.I, train=scope)

    def adam(self, site: Site, batch: int) -> Training:
        """Settings of cRB and LED."""
        return on_server(site, optimiser="adam", lr=self.lr, weight_decay=self.weight_decay, batch_size=batch)

    def inputs(self, site: Site, w_tl: Payload, w_cr: Payload, predictions: Iterable[Predictions]) -> Inputs:
        """The ensemble's inputs on the site's data; `predictions` are the clients'."""
        tl, cr = predict(site, w_tl), predict(site, w_cr)
        g = mean_features(predictions) * cr.features if self.ec else torch.empty(0)
        return Inputs(tl.logits, cr.logits, normalize(g, dim=-1) if self.unit_gate else g)

    def tuned(self, site: Site, server: Payload, inputs: Inputs) -> Payload:
        """Groups of the server's payload: a, b, v and Adam's moments after this round's steps."""
        y = site.data.labels

        def loss(c: Mapping[str, Tensor], row: Tensor) -> Tensor:
            return cross_entropy(ensembled(c, Inputs(*(t[row] for t in inputs))), y[row])

        frozen = Frozen(*inputs, y)
        c, moments = calibrate(
            site, server[CALIBRATION], server[ADAM], loss, frozen, lr=self.lr, batch=self.batch, steps=self.I
        )
        return {CALIBRATION: c, ADAM: moments}

    def combined(self, inputs: Inputs, server: Payload) -> Tensor:
        """The ensemble's logits: z_ec, or without EC the sum over the models that DFL makes."""
        if self.ec:
            return ensembled(server[CALIBRATION], inputs)
        if self.dfl == "both":
            return inputs.z_tl + inputs.z_cr
        return inputs.z_tl if self.reweights else inputs.z_cr

    def distilled(self, site: Site, w_g: Payload, teacher: Tensor | None) -> Payload:
        """w_g after LED; without a teacher it trains on D0's labels alone."""
        training, steps = self.adam(site, self.led_batch), student_steps(site, self.J, self.led_batch)
        if teacher is None:
            return train_model(site, w_g, site.loss, training, steps)
        return train_student(site, w_g, teacher, self.distillation_loss, training, steps)

    def distillation_loss(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        """Eq. 22 of logits [batch, classes]."""
        s, t = student / self.T, teacher / self.T
        if self.kd == "traditional":
            soft = imitation(s, t)
        else:
            target, others = decoupled(s, t, y)
            soft = (self.alpha * target + self.beta * others).mean()
        return self.lam * cross_entropy(student, y) + (1 - self.lam) * self.T**2 * soft

    def ensemble(self, site: Site, server: Payload) -> Tensor | None:
        if not self.ensembles:
            return None
        clients = (predict(site, model) for model in unstack_models(CLIENTS, server)) if self.ec else ()
        w_tl, w_cr = unstack_models(TEAM, server)
        return self.combined(self.inputs(site, w_tl, w_cr, clients), server)
