"""FedDDC: Federated Learning on Non-IID and Long-tailed Data via Dual-decoupling.

Wang, Li, Li, Hu, Wang. Frontiers of Information Technology & Electronic Engineering 2024. doi:10.1631/FITEE.2300284

Clients are FedAvg's. S are those of a round, F(x; w) logits, f(x; w) features, D0 the server's public set.
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
Traditional-KD: kd=traditional. FedAvg fine-tuned on D0, the control: lam=1.
Without LED w_g is sent and the ensemble tested beside it; where that is one model (h, i), the model is sent. Without EC
the teacher is the plain sum of logits. A model that DFL does not make is w_g.
Reading: sums over S; I counts steps of cRB; TLCR is done once a round; w_tl is the whole model.
Reading: a, b, v are trained on CE over D0 by I steps of Adam, kept with its moments between rounds, as in FEDIC's code.
Departure: Eq. 17's denominators get the exp they lack. L_k is at least 1e-8.
Departure: teachers see D0 as it is, the student augmented if the clients are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fedskew.core.losses import decoupled, imitation
from fedskew.core.method import Method, Update, mean_of, model_of, overlay
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Natural, NotNegative, Positive, Training
from fedskew.methods._shared.distillation import (
    View,
    calibrate,
    calibrated,
    kept,
    mean_features,
    no_moments,
    on_server,
    restored,
    taught,
    trained,
    view,
)

CALIBRATION, ADAM = "calibration", "adam"  # groups of the server's state
TEAM, CLIENTS = "team", "clients"  # models kept for the ensemble
Form = Literal["literal", "signed"]


def target_loss(logits: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """U and L of each client, [K], from logits [K, n, C]; `signed` centres the logits of a sample for U."""
    z, rows = logits.double(), torch.arange(len(y))
    L = z.logsumexp(2) - z[:, rows, y]
    U = (z - z.mean(2, keepdim=True) if form == "signed" else z)[:, rows, y]
    return U.mean(1), L.mean(1).clamp(min=1e-8)


def confidence(U: Tensor, L: Tensor, form: Form, temperature: float = 1.0) -> Tensor:
    """Q. Where U < 0 the literal R = U / L prefers the larger loss; `signed` takes U L there."""
    R = U / L if form == "literal" else torch.where(U < 0, U * L, U / L)
    return (R / temperature).softmax(0)


class Inputs(NamedTuple):
    """What the ensemble is made of, a row a sample."""

    z_tl: Tensor  # F(x; w_tl), [n, C]
    z_cr: Tensor  # [n, C]
    g: Tensor  # [n, d]


def ensembled(c: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """z_ec."""
    return calibrated(c, inputs.z_tl, inputs.z_cr, inputs.g @ c["v"])


@dataclass(frozen=True)
class FedDDC(Method):
    public: ClassVar[bool] = True

    dfl: Literal["both", "tlcr", "crb", "none"] = "both"  # the paper's
    ec: bool = True  # the paper's
    led: bool = True  # the paper's
    tlcr: Form = "literal"  # the paper's; signed: ours, sound for negative logits
    tlcr_temp: Positive = 1.0  # the paper's; divides R
    crb_scope: Literal["all", "head"] = "all"  # Eq. 11; head: its text
    unit_gate: bool = False  # the paper's; True: g / |g|, which cannot saturate the gate
    kd: Literal["dkd", "traditional"] = "dkd"  # the paper's; traditional: KL(teacher || student)
    lam: Annotated[float, Meta(ge=0, le=1)] = 0.5  # the paper's lambda
    alpha: NotNegative = 1.0  # the paper's
    beta: NotNegative = 2.0  # the paper's
    T: Positive = 1.0  # the paper's; logits over T, times T^2
    I: Natural = 100  # the paper's
    J: Natural = 100  # the paper's; 0: FedAvg
    lr: Positive = 0.002  # the paper's
    weight_decay: NotNegative = 2e-4  # FEDIC's, of cRB and LED
    batch: Count = 20  # FEDIC's, of cRB and EC
    led_batch: Count = 128  # FEDIC's

    @property
    def reweights(self) -> bool:
        return self.dfl in ("both", "tlcr")

    @property
    def rebalances(self) -> bool:
        return self.dfl in ("both", "crb")

    @property
    def ensembles(self) -> bool:
        """Whether what is tested beside w_g is no single model."""
        return not self.led and (self.ec or self.dfl == "both")

    @property
    def teaches(self) -> bool:
        """Whether anybody looks at the teacher."""
        return (self.J > 0 and self.lam < 1) if self.led else (self.ec or self.dfl != "none")

    def init_server(self, site: Site) -> Payload:
        server = super().init_server(site)
        if not self.ec:
            return server
        start = Tensors(a=torch.ones(site.classes), b=torch.zeros(site.classes), v=torch.zeros(site.net.features))
        return server | {CALIBRATION: start, ADAM: no_moments(start)}

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        sent = list(updates)  # every model is needed at once
        server = server | overlay(server, mean_of(sent))
        w_g, teacher = model_of(server), None
        if self.teaches:
            clients = [model_of(update.payload) for update in sent]
            views = [view(site, model) for model in clients] if self.ec or self.reweights else []
            w_tl = self.reweighted(site, sent, views) if self.reweights else w_g
            w_cr = self.rebalanced(site, w_g) if self.rebalances else w_g
            if not self.led and not self.ensembles:
                return server | (w_tl if self.reweights else w_cr)
            inputs = self.inputs(site, w_tl, w_cr, views)
            if self.ec:
                server = server | self.tuned(site, server, inputs)
            if self.ensembles:
                return server | kept(TEAM, [w_tl, w_cr]) | (kept(CLIENTS, clients) if self.ec else {})
            teacher = self.combined(inputs, server)
        return server | self.distilled(site, w_g, teacher) if self.led else server

    def reweighted(self, site: Site, sent: Sequence[Update], views: Sequence[View]) -> Payload:
        """w_tl."""
        U, L = target_loss(torch.stack([v.logits for v in views]), site.data.labels, self.tlcr)
        Q = confidence(U, L, self.tlcr, self.tlcr_temp).tolist()
        return mean_of(replace(update, weight=q) for update, q in zip(sent, Q, strict=True))

    def rebalanced(self, site: Site, w_g: Payload) -> Payload:
        """w_cr."""
        scope = "head." if self.crb_scope == "head" else ""
        return trained(site, w_g, site.loss, self.adam(site, self.batch), self.I, train=scope)

    def adam(self, site: Site, batch: int) -> Training:
        return on_server(site, optimiser="adam", lr=self.lr, weight_decay=self.weight_decay, batch_size=batch)

    def inputs(self, site: Site, w_tl: Payload, w_cr: Payload, views: Iterable[View]) -> Inputs:
        """What the ensemble is made of, on the site's data; `views` are the clients'."""
        tl, cr = view(site, w_tl), view(site, w_cr)
        g = mean_features(views) * cr.features if self.ec else torch.empty(0)
        return Inputs(tl.logits, cr.logits, normalize(g, dim=-1) if self.unit_gate else g)

    def tuned(self, site: Site, server: Payload, inputs: Inputs) -> Payload:
        """a, b, v and Adam's moments after this round's steps."""
        y = site.data.labels

        def loss(c: Mapping[str, Tensor], row: Tensor) -> Tensor:
            return cross_entropy(ensembled(c, Inputs(*(t[row] for t in inputs))), y[row])

        c, moments = calibrate(
            site, server[CALIBRATION], server[ADAM], loss, lr=self.lr, batch=self.batch, steps=self.I
        )
        return {CALIBRATION: c, ADAM: moments}

    def combined(self, inputs: Inputs, server: Payload) -> Tensor:
        """The ensemble's logits: z_ec, or without EC the sum of what DFL makes."""
        if self.ec:
            return ensembled(server[CALIBRATION], inputs)
        if self.dfl == "both":
            return inputs.z_tl + inputs.z_cr
        return inputs.z_tl if self.reweights else inputs.z_cr

    def distilled(self, site: Site, w_g: Payload, teacher: Tensor | None) -> Payload:
        """w_g after LED; without a teacher, on D0's labels alone."""
        training = self.adam(site, self.led_batch)
        if teacher is None:
            return trained(site, w_g, site.loss, training, self.J)
        return taught(site, w_g, teacher, self.lesson, training, self.J)

    def lesson(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        """Eq. 22."""
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
        clients = (view(site, model) for model in restored(CLIENTS, server)) if self.ec else ()
        w_tl, w_cr = restored(TEAM, server)
        return self.combined(self.inputs(site, w_tl, w_cr, clients), server)
