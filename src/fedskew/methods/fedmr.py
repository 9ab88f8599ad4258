"""FedMR: Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping.

Fan, Yao, Zhang, Lyu, Zhang, Wang. TMLR 2023. arXiv:2405.18983

    Eq. 3: l_intra = mean_c |M_c|_F^2,  M_c the correlation matrix of class c's features
    Eq. 4: l_inter = mean over pairs (c_i, c_j) of D,
           D = mean over z of class c_i of max(|z - g_ci| - |z - g_cj|, 0),  g the global prototypes
    Eq. 5: L = l_cls + mu1 l_intra + mu2 l_inter
    Alg. 1: g_c = sum_k N_k^c g_k^c / sum_k N_k^c,  g_k^c the class means after local training

Departure: deviation and covariance are both normalised by n-1 (the paper's 1/n breaks its Lemma 1).
Departure: Eq. 4 is divided by the mean distance of prototypes (inter_form=norm). As printed its gradient does not
depend on the size of the features, and features and prototypes grow until a net without batch norm diverges.
Departure: statistics are those of a batch, over classes with at least two samples (as in the authors' code).
Departure: c_j runs over all classes by default (Eq. 4 prints the client's own, the text speaks of the missing ones).
Departure: with mu2 = 0 no prototypes are sent; a class that no client sends keeps its last prototype.
Departure: Lite draws its samples in each batch (the paper does not say when).
Table 8 (prototypes added to another method): base=fedprox,mu1=0 and so on; the base has its default settings.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

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

# Default of mu1 by intra_form: `code` was chosen on validation data, with inter_form norm (results/fedmr-fmnist). The
# others have the same gradient at 16 samples per class (`paper`: and 84 features). For linear features without batch
# norm, such as simple-cnn's projection, a tenth works better (results/baselines-fmnist).
MU1 = {"paper": 2e-4, "code": 0.1, "norm": 1.4}
# Default of mu2 by inter_form: `paper` diverges at 0.1 on a net without batch norm.
MU2 = {"paper": 0.01, "norm": 0.1}
Form = Literal["paper", "code", "norm"]
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
    terms_off = {"mu1": 0.0, "mu2": 0.0}

    mu1: NotNegative | None = setting(
        None,
        help="Weight of l_intra; 0: off, None: MU1 of intra_form.",
        source="chosen on validation data; the paper's appendix is not available, the authors' code has 0.01 and 1e-5",
        search=(0.01, 1.0),
    )
    mu2: NotNegative | None = setting(
        None,
        help="Weight of l_inter; 0: off and no prototypes are sent, None: MU2 of inter_form.",
        source="chosen on validation data; the paper's appendix is not available, the authors' code has no l_inter",
        search=(0.01, 1.0),
    )
    intra_form: Form = setting(
        "code",
        help="Scale of l_intra: as printed (paper), as in the authors' code, or free of scale (norm).",
        source="the authors' code",
    )
    inter_form: Literal["paper", "norm"] = setting(
        "norm", help="Eq. 4 as printed, or divided by the mean distance of prototypes.", source="our choice, see above"
    )
    inter_scope: Literal["all", "present", "missing"] = setting(
        "all", help="Classes c_j of Eq. 4: all, the client's own, or those it lacks.", source="our choice, see above"
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

    @property
    def weights(self) -> tuple[float, float]:
        """mu1 and mu2, with None replaced by the default of the form."""
        mu1 = MU1[self.intra_form] if self.mu1 is None else self.mu1
        return mu1, MU2[self.inter_form] if self.mu2 is None else self.mu2

    @property
    def guided(self) -> bool:
        """Whether prototypes are used at all."""
        return self.weights[1] > 0

    def init_server(self, site: Site) -> Payload:
        return BASES[self.base].init_server(site) | ({GROUP: no_prototypes(site)} if self.guided else {})

    def broadcast(self, server: Payload) -> Payload:
        return BASES[self.base].broadcast(server) | ({GROUP: server[GROUP]} if self.guided else {})

    def reshaped(self, site: Site, broadcast: Payload) -> Loss:
        """The loss of Eq. 5."""
        mu1, mu2 = self.weights
        if mu1 == mu2 == 0:
            return site.loss
        g, known, others = self.rivals(site, broadcast)
        margin = bool(others.any())  # False in the first round
        if self.inter_form == "norm":
            mu2 = mu2 / float(mean_distance(g[known]))
        lite = self.lite and (margin or (mu1 and self.lite_scope == "both"))

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            z = net.body(x)
            total = site.loss(Seen(net, z), x, y)
            some = torch.randperm(len(y), generator=site.rng)[: self.lite] if lite else slice(None)
            if mu1:
                part = some if self.lite_scope == "both" else slice(None)
                total = total + mu1 * intra_class(z[part], y[part], self.intra_form)
            if margin:
                total = total + mu2 * inter_class(z[some], y[some], g, known, others)
            return total

        return loss

    def rivals(self, site: Site, broadcast: Payload) -> tuple[Tensor, Tensor, Tensor]:
        """Global prototypes, a mask of those that are known, and a mask of those that are c_j at this site."""
        prototypes = broadcast[GROUP] if self.guided else no_prototypes(site)
        known = prototypes["count"] > 0
        held = torch.bincount(site.data.labels, minlength=site.classes) > 0
        others = known & {"all": known, "present": held, "missing": ~held}[self.inter_scope]
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
