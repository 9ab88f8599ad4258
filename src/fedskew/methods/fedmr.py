"""FedMR: Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping.

Fan, Yao, Zhang, Lyu, Zhang, Wang. TMLR 2023. arXiv:2405.18983

    Eq. 3: l_intra = mean_c |M_c|_F^2,  M_c the correlation matrix of class c's features
    Eq. 4: l_inter = mean over pairs (c_i, c_j) of D,
           D = mean over z of class c_i of max(|z - g_ci| - |z - g_cj|, 0),  g the global prototypes
    Eq. 5: L = l_cls + mu1 l_intra + mu2 l_inter
    Alg. 1: g_c = sum_k N_k^c g_k^c / sum_k N_k^c,  g_k^c the class means after local training

preset=paper is Eqs. 3 and 4 as printed. The default, preset=robust, departs from them in four points:
Departure: l_intra is the mean square of the off-diagonal correlations (intra_form=norm). As printed it grows with the
number of features, in the authors' code with the samples per class.
Departure: in each batch l_intra's weight is reduced until its gradient at the features is no larger than that of l_cls.
A correlation has no scale, so the gradient goes with 1 / s, s the deviation of features from their class mean. With a
fixed weight it overpowers l_cls on a net that starts with small s and has no batch norm, which then stays at chance.
Departure: Eq. 4 is divided by the mean distance of prototypes (inter_form=norm). As printed its gradient does not
depend on the size of the features, and features and prototypes grow until a net without batch norm diverges.
Departure: c_j runs over all classes (Eq. 4 prints the client's own, the text speaks of the missing ones).
In both presets:
Departure: deviation and covariance are both normalised by n-1 (the paper's 1/n breaks its Lemma 1).
Departure: statistics are those of a batch, over classes with at least two samples (as in the authors' code).
Departure: with mu2 = 0 no prototypes are sent; a class that no client sends keeps its last prototype.
Departure: Lite draws its samples in each batch (the paper does not say when).
Table 8 (prototypes added to another method): base=fedprox,mu1=0 and so on; the base has its default settings.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import pdist

from fedskew.core.method import Method, Paper, Update
from fedskew.core.net import Net, Seen
from fedskew.core.seeding import seeded
from fedskew.core.settings import setting
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural, NotNegative
from fedskew.methods._shared.prototypes import GROUP, PrototypeMean, no_prototypes, prototypes_of
from fedskew.methods.feddc import FedDC
from fedskew.methods.feddyn import FedDyn
from fedskew.methods.fednova import FedNova
from fedskew.methods.fedprox import FedProx
from fedskew.methods.moon import MOON

# Default of mu1 by intra_form. `norm` was chosen on validation data (results/fedmr-fmnist), `code` is that of the
# authors' code. `paper` has the weight of `norm`: its sum of d (d - 1) squares is divided by their number.
MU1 = {"norm": 1.4, "code": 0.01}
# Default of mu2 by inter_form: `paper` diverges at 0.1 on a net without batch norm.
MU2 = {"paper": 0.01, "norm": 0.1}
Form = Literal["paper", "code", "norm"]


@dataclass(frozen=True)
class Preset:
    """What fields that are None stand for."""

    intra_form: Form
    inter_form: Literal["paper", "norm"]
    inter_scope: Literal["all", "present", "missing"]
    limit: float


PRESETS = {"robust": Preset("norm", "norm", "all", 1.0), "paper": Preset("paper", "paper", "present", 0.0)}
BASES = {
    "fedavg": Method(),
    "fedprox": FedProx(),
    "fednova": FedNova(),
    "moon": MOON(),
    "feddyn": FedDyn(),
    "feddc": FedDC(),
}


def intra_class(z: Tensor, y: Tensor, form: Form) -> Tensor:
    """l_intra as in Eq. 3 (`paper`), as in the authors' code (`code`) or free of scale (`norm`).

    With R the correlation matrix of a class and r the mean square of its off-diagonal entries:
    paper: mean_c |R|_F^2;  code: sum_c (n_c - 1)^2 r_c / sum_c n_c;  norm: mean_c r_c.
    """
    d = z.shape[1]
    same = (y[:, None] == y).to(z.dtype)  # same @ z: for each sample, the sum over its class
    n = same.sum(1, keepdim=True)  # size of each sample's class; everything below is per sample too
    counts = (n > 1).to(z.dtype)
    x = z - same @ z / n
    variance = same @ x.square() / (n - 1).clamp(min=1)
    scale = variance + 1e-8
    x = x * scale.rsqrt() * (counts / (n - 1).clamp(min=1).sqrt())
    # |x^T x|_F = |x x^T|_F, and the matrix of samples by samples is the smaller one
    square = (same * (x @ x.T).square()).sum(1, keepdim=True)  # its sum over a class is |R|_F^2
    if form == "paper":
        return square.sum() / (counts / n).sum().clamp(min=1)
    diagonal = counts / n * (variance / scale).square().sum(1, keepdim=True)
    r = (square - diagonal) / max(d * (d - 1), 1)
    if form == "norm":
        return r.sum() / (counts / n).sum().clamp(min=1)
    return ((n - 1).square() * r).sum() / counts.sum().clamp(min=1)


def balanced(intra: Tensor, task: Tensor, z: Tensor, limit: float) -> Tensor:
    """`intra`, scaled down where its gradient at the features z is more than `limit` times that of the loss `task`."""
    if not z.requires_grad:  # no part of the net before the features is trained
        return intra
    own: Tensor
    others: Tensor
    own, others = (torch.autograd.grad(loss, z, retain_graph=True)[0].norm() for loss in (intra, task))
    return intra * (limit * others / own.clamp(min=1e-30)).clamp(max=1)


def inter_class(z: Tensor, y: Tensor, g: Tensor, known: Tensor, others: Tensor) -> Tensor:
    """l_inter (Eq. 4): c_i are the `known` classes of the batch, c_j != c_i those in `others` (masks over classes)."""
    distance = torch.cdist(z, g, compute_mode="donot_use_mm_for_euclid_dist")  # exact, and gradient 0 at a prototype
    hinge = (distance.gather(1, y[:, None]) - distance).relu()
    n = (y[:, None] == y).sum(1, keepdim=True)
    pairs = known[y][:, None] * others / n  # the samples of a class together have the weight 1
    pairs = pairs.scatter(1, y[:, None], 0.0)
    return (pairs * hinge).sum() / pairs.sum().clamp(min=1)


def mean_distance(g: Tensor) -> Tensor:
    """The mean distance between two prototypes; 1 if there are fewer than two."""
    distances = pdist(g)
    return distances.mean() if len(distances) else torch.ones(())


@dataclass(frozen=True)
class FedMR(Method):
    """Decorrelates the features of each class and keeps them nearer to their own global prototype than to others."""

    paper = Paper(
        title="Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping",
        authors="Fan, Yao, Zhang, Lyu, Zhang, Wang",
        venue="TMLR 2023",
        link="arXiv:2405.18983",
    )
    formula = (
        r"L &= L_{cls} + \mu_1 L_{intra} + \mu_2 L_{inter} \\ "
        r"L_{intra} &= \underset{c}{\mathrm{mean}} \; \lVert M_c \rVert_F^2, "
        r"\qquad M_c \text{ the correlations of class } c\text{'s features} \\ "
        r"L_{inter} &= \underset{c, c'}{\mathrm{mean}} \; \underset{z \in c}{\mathrm{mean}} \; \max\bigl( \lVert z - "
        r"g_c \rVert - \lVert z - g_{c'} \rVert, \, 0 \bigr), \qquad g_c = \frac{\sum_k N_k^c g_k^c}{\sum_k N_k^c}"
    )
    terms_off = {"mu1": 0.0, "mu2": 0.0}

    preset: Literal["robust", "paper"] = setting(
        "robust",
        help="What settings that are None stand for: safe on any net (robust), or Eqs. 3 and 4 as printed (paper).",
        source="chosen on validation data (results/fedmr-fmnist)",
    )
    mu1: NotNegative | None = setting(
        None,
        help="Weight of l_intra; 0: off, None: 1.4 (norm), 0.01 (code) or 1.4 / (d (d - 1)) for d features (paper).",
        source="chosen on validation data; not in the paper without its appendix; the authors' code has 0.01 and 1e-5",
        search=(0.1, 20.0),
    )
    mu2: NotNegative | None = setting(
        None,
        help="Weight of l_inter; 0: off and no prototypes are sent, None: 0.1 (norm) or 0.01 (paper).",
        source="chosen on validation data; the paper's appendix is not available, the authors' code has no l_inter",
        search=(0.01, 1.0),
    )
    intra_form: Form | None = setting(
        None,
        help="l_intra as printed (paper), as in the authors' code, or free of scale (norm); None: the preset's.",
        source="the preset",
    )
    limit: NotNegative | None = setting(
        None,
        help="Largest gradient of mu1 l_intra at a batch's features, relative to that of l_cls; l_intra's weight is "
        "reduced to it. 0: no limit, None: the preset's, 1 or 0.",
        source="the preset",
    )
    inter_form: Literal["paper", "norm"] | None = setting(
        None,
        help="Eq. 4 as printed, or divided by the mean distance of prototypes; None: the preset's.",
        source="the preset",
    )
    inter_scope: Literal["all", "present", "missing"] | None = setting(
        None,
        help="Classes c_j of Eq. 4: all, the client's own, or those it lacks; None: the preset's, all or present.",
        source="the preset",
    )
    lite: Natural = setting(
        0, help="Samples of a batch that l_inter uses; 0: all.", source="the paper; its Lite variants have 10 and 50"
    )
    lite_scope: Literal["inter", "both"] = setting(
        "inter", help="Losses to which lite applies: l_inter, or l_intra as well.", source="the paper"
    )
    proto_share: Annotated[float, Meta(gt=0, le=1)] = setting(
        1.0, help="Share of clients that send prototypes.", source="the paper; its Table 5 has 0.5 and 0.8"
    )
    share_seed: int = setting(0, help="Seed that decides which clients send prototypes.", source="our choice")
    base: Literal["fedavg", "fedprox", "fednova", "moon", "feddyn", "feddc"] = setting(
        "fedavg",
        help="Method that FedMR's terms are added to, with its default settings.",
        source="the paper's Table 8",
    )

    def chosen(self, field: str) -> Any:
        """The value of a field, or the preset's if it is None."""
        value = getattr(self, field)
        return getattr(PRESETS[self.preset], field) if value is None else value

    def weights(self, features: int) -> tuple[float, float]:
        """mu1 and mu2 for a net with this many features, with None replaced by the defaults of their forms."""
        form, pairs = self.chosen("intra_form"), max(features * (features - 1), 1)
        default = MU1["norm"] / pairs if form == "paper" else MU1[form]
        return default if self.mu1 is None else self.mu1, MU2[
            self.chosen("inter_form")
        ] if self.mu2 is None else self.mu2

    @property
    def guided(self) -> bool:
        """Whether prototypes are used at all."""
        return self.mu2 != 0

    def init_server(self, site: Site) -> Payload:
        return BASES[self.base].init_server(site) | ({GROUP: no_prototypes(site)} if self.guided else {})

    def broadcast(self, server: Payload) -> Payload:
        return BASES[self.base].broadcast(server) | ({GROUP: server[GROUP]} if self.guided else {})

    def reshaped(self, site: Site, broadcast: Payload) -> Loss:
        """The loss of Eq. 5."""
        if self.mu1 == self.mu2 == 0:
            return site.loss
        mu1, mu2 = self.weights(site.net.features)
        g, known, others = self.rivals(site, broadcast)
        margin = bool(others.any())  # False in the first round
        if self.chosen("inter_form") == "norm":
            mu2 = mu2 / float(mean_distance(g[known]))
        form, limit = self.chosen("intra_form"), self.chosen("limit")
        lite = self.lite and (margin or (mu1 and self.lite_scope == "both"))

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            z = net.body(x)
            total = site.loss(Seen(net, z), x, y)
            some = torch.randperm(len(y), generator=site.rng)[: self.lite] if lite else slice(None)
            if mu1:
                part = some if self.lite_scope == "both" else slice(None)
                intra = mu1 * intra_class(z[part], y[part], form)
                total = total + (balanced(intra, total, z, limit) if limit else intra)
            if margin:
                total = total + mu2 * inter_class(z[some], y[some], g, known, others)
            return total

        return loss

    def rivals(self, site: Site, broadcast: Payload) -> tuple[Tensor, Tensor, Tensor]:
        """Global prototypes, a mask of those that are known, and a mask of those that are c_j at this site."""
        prototypes = broadcast[GROUP] if self.guided else no_prototypes(site)
        known = prototypes["count"] > 0
        held = torch.bincount(site.data.labels, minlength=site.classes) > 0
        others = known & {"all": known, "present": held, "missing": ~held}[self.chosen("inter_scope")]
        return prototypes["mean"].to(site.device), known.to(site.device), others.to(site.device)

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        reshaping = replace(site, loss=self.reshaped(site, broadcast))
        update, state = BASES[self.base].client(reshaping, broadcast, state)
        if self.guided:
            update = update.plus(**{GROUP: prototypes_of(site) if self.sends(site) else no_prototypes(site)})
        return update, state

    def sends(self, site: Site) -> bool:
        """Whether this client sends prototypes: a fixed random choice that each site can make from share_seed."""
        order = torch.randperm(site.population, generator=seeded(self.share_seed))
        return site.client in order[: max(1, round(self.proto_share * site.population))]

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        base = BASES[self.base]
        if not self.guided:
            return base.aggregate(site, server, updates)
        pool = PrototypeMean(server[GROUP])
        return base.aggregate(site, server, pool.watch(updates)) | {GROUP: pool.value()}
