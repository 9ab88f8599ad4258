"""FedMR: Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping.

Fan, Yao, Zhang, Lyu, Zhang, Wang. TMLR 2023. arXiv:2405.18983

    Eq. 3: l_intra = mean_c |M_c|_F^2,  M_c the correlation matrix of class c's features
    Eq. 4: l_inter = mean over pairs (c_i, c_j) of D,
           D = mean over z of class c_i of max(|z - g_ci| - |z - g_cj|, 0),  g the global prototypes
    Eq. 5: L = l_cls + mu1 l_intra + mu2 l_inter
    Alg. 1: g_c = sum_k N_k^c g_k^c / sum_k N_k^c,  g_k^c the class means after local training

Departure: one normaliser n-1 for deviation and covariance (the paper's 1/n breaks its Lemma 1).
Departure: Eq. 4 is taken over the mean distance of prototypes (inter_form=norm). As printed it pulls equally hard
however large the features are, and features, prototypes and pull grow together until a net without batch norm diverges.
Departure: statistics are a batch's, of classes with two samples or more (as in the authors' code).
Departure: c_j runs over all classes by default; Eq. 4 prints the client's own, the text means the missing.
Departure: mu2 = 0 leaves prototypes out of the payload; a class nobody sends keeps its last prototype.
Departure: Lite draws its samples anew in each batch; the paper does not say.
Table 8 (prototypes added to another method): base=fedprox,mu1=0 and so on, the base with its own defaults.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import pdist

from fedskew.core.method import Method, Update
from fedskew.core.net import Net, Seen
from fedskew.core.seeding import seeded
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Natural, NotNegative
from fedskew.methods._shared.prototypes import GROUP, Pool, no_prototypes, prototypes_of
from fedskew.methods.feddc import FedDC
from fedskew.methods.feddyn import FedDyn
from fedskew.methods.fednova import FedNova
from fedskew.methods.fedprox import FedProx
from fedskew.methods.moon import MOON

# chosen on validation data for `code` and `norm` (results/fedmr-fmnist); `norm` and `paper` pull alike
# at 16 samples a class (and 84 features for `paper`). Linear features without batch norm, such as simple-cnn's
# projection, want a tenth of it (results/baselines-fmnist)
MU1 = {"paper": 2e-4, "code": 0.1, "norm": 1.4}
MU2 = {"paper": 0.01, "norm": 0.1}  # `paper` diverges at 0.1 on a net without batch norm
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
    """Eq. 3 as printed (`paper`), as in the authors' code (`code`) or free of scale (`norm`).

    With R the correlation matrix of a class and r the mean square of its off-diagonal entries:
    paper: mean_c |R|_F^2;  code: sum_c (n_c - 1)^2 r_c / sum_c n_c;  norm: mean_c r_c.
    """
    d = z.shape[1]
    same = (y[:, None] == y).to(z.dtype)  # class sums of all samples at once: same @ z
    n = same.sum(1, keepdim=True)  # of each sample's class, as everything below
    counts = (n > 1).to(z.dtype)
    x = z - same @ z / n
    variance = same @ x.square() / (n - 1).clamp(min=1)
    scale = variance + 1e-8
    x = x * scale.rsqrt() * (counts / (n - 1).clamp(min=1).sqrt())
    # |x^T x|_F = |x x^T|_F: samples by samples is the cheaper one
    square = (same * (x @ x.T).square()).sum(1, keepdim=True)  # summed over a class: |R|_F^2
    if form == "paper":
        return square.sum() / (counts / n).sum().clamp(min=1)
    diagonal = counts / n * (variance / scale).square().sum(1, keepdim=True)
    r = (square - diagonal) / max(d * (d - 1), 1)
    if form == "norm":
        return r.sum() / (counts / n).sum().clamp(min=1)
    return ((n - 1).square() * r).sum() / counts.sum().clamp(min=1)


def inter_class(z: Tensor, y: Tensor, g: Tensor, known: Tensor, others: Tensor) -> Tensor:
    """Eq. 4 over c_i `known` in the batch and c_j != c_i in `others` (masks over classes)."""
    distance = torch.cdist(z, g, compute_mode="donot_use_mm_for_euclid_dist")  # exact, and gradient 0 at a prototype
    hinge = (distance.gather(1, y[:, None]) - distance).relu()
    n = (y[:, None] == y).sum(1, keepdim=True)
    pairs = known[y][:, None] * others / n  # a class's samples together count as one
    pairs = pairs.scatter(1, y[:, None], 0.0)
    return (pairs * hinge).sum() / pairs.sum().clamp(min=1)


def apart(g: Tensor) -> Tensor:
    """The mean distance between two prototypes; 1 where there are not two."""
    distances = pdist(g)
    return distances.mean() if len(distances) else torch.ones(())


@dataclass(frozen=True)
class FedMR(Method):
    mu1: NotNegative | None = None  # ours, the paper's is in an appendix we do not have; None: MU1 of the form
    mu2: NotNegative | None = None  # ours; None: MU2 of the form
    intra_form: Form = "code"  # the only one with a published weight
    inter_form: Literal["paper", "norm"] = "norm"  # ours: Eq. 4 over the mean distance of prototypes, see above
    inter_scope: Literal["all", "present", "missing"] = "all"  # ours, see above
    lite: Natural = 0  # samples a batch for the inter-class loss, 0 all; the paper's Lite has 10 and 50
    lite_scope: Literal["inter", "both"] = "inter"  # the paper's
    proto_share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of clients that send prototypes; the paper's
    share_seed: int = 0  # of who they are
    base: Literal["fedavg", "fedprox", "fednova", "moon", "feddyn", "feddc"] = "fedavg"  # Table 8: added to it

    @property
    def weights(self) -> tuple[float, float]:
        """mu1 and mu2 as they are used."""
        mu1 = MU1[self.intra_form] if self.mu1 is None else self.mu1
        return mu1, MU2[self.inter_form] if self.mu2 is None else self.mu2

    @property
    def guided(self) -> bool:
        """Whether there are prototypes at all."""
        return self.weights[1] > 0

    def init_server(self, site: Site) -> Payload:
        return BASES[self.base].init_server(site) | ({GROUP: no_prototypes(site)} if self.guided else {})

    def broadcast(self, server: Payload) -> Payload:
        return BASES[self.base].broadcast(server) | ({GROUP: server[GROUP]} if self.guided else {})

    def reshaped(self, site: Site, broadcast: Payload) -> Loss:
        """Eq. 5."""
        mu1, mu2 = self.weights
        if mu1 == mu2 == 0:
            return site.loss
        g, known, others = self.rivals(site, broadcast)
        margin = bool(others.any())  # not in the first round
        if self.inter_form == "norm":
            mu2 = mu2 / float(apart(g[known]))
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
        """Global prototypes, which of them are known, and which of those serve as c_j at this site."""
        prototypes = broadcast[GROUP] if self.guided else no_prototypes(site)
        known = prototypes["count"] > 0
        held = torch.bincount(site.data.labels, minlength=site.classes) > 0
        others = known & {"all": known, "present": held, "missing": ~held}[self.inter_scope]
        return prototypes["mean"].to(site.device), known.to(site.device), others.to(site.device)

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        reshaping = replace(site, loss=self.reshaped(site, broadcast))
        update, state = BASES[self.base].client(reshaping, broadcast, state)
        if self.guided:
            own = prototypes_of(site) if self.sends(site) else no_prototypes(site)
            update = update.plus(**{GROUP: own})
        return update, state

    def sends(self, site: Site) -> bool:
        """Whether this client sends prototypes: drawn once for all, by a rule each site can follow alone."""
        order = torch.randperm(site.population, generator=seeded(self.share_seed))
        return site.client in order[: max(1, round(self.proto_share * site.population))]

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        base = BASES[self.base]
        if not self.guided:
            return base.aggregate(site, server, updates)
        pool = Pool(server[GROUP])
        return base.aggregate(site, server, pool.watch(updates)) | {GROUP: pool.value()}
