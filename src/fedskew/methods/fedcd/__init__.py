"""FedCD: A Classifier Debiased Federated Learning Framework for Non-IID Data.

Long, Xue, Chu, Zhang, Wu, Zang, Du. ACM MM 2023. doi:10.1145/3581783.3611966

A class c has M fine classes j = (c, m), each with a prototype P_j and a class-vector phi^j. f makes z = f(x; theta).
    Eq. 1:    P^g_j = sum_k n^k_j P^k_j / sum_k n^k_j
    Eq. 2:    t = argmax_m cos(z, P^g_{c,m}), a sample's fine class
    Eq. 3, 4: omega = s_{c,t} / (s_{c,t} + alpha sum_{m != t} s_{c,m} + (1 - alpha) sum_{c' != c} sum_m s_{c',m}),
              s_j = exp(cos(z, P^k_j) / tau)
    Eq. 5:    L_hpc = -1/N sum I log omega, over samples (I = 1) and all P^g_j (I = n_j);  N = sum I
    Eq. 6, 7: L_bpr = mean over the batch's classes of CE(u(mean z of the class; phi), c);  u(z; phi) = z phi W
    Eq. 9:    L_gid = 1/N sum I (TCKD + xi NCKD) between u(z; phi), which is constant, and u(z; phi_k)
    Eq. 10:   L_dcl = 1/N sum I CE(u(z; phi_k), c)
    Eq. 11:   L = mu L_dcl + (1 - mu) L_hpc + gamma L_bpr + lam L_gid,  mu = 1 - t/T
    Eq. 13:   q_k^j = softmax(P^g_j phi_k)[j];  Eq. 14: nu^j = softmax_k(q_k^j);  Eq. 15: phi^j = sum_k nu^j[k] phi_k^j
Preset paper: as printed. P^g weigh as much as all clients' samples, so those of a batch have 1 / (K + 1) of the
gradient, and in the last rounds CE has next to none: it learns fast at first and slowly later.
Preset robust: rho = 0.1, mu = 0.9 in all rounds, Eq. 14's softmax times n^k_j, k-means centres of trained features.
Which of them makes the difference: results/fedcd-fmnist.
-hpc: hpc=false; -dkd: lam=0; -bpr: gamma=0; -acla: classifier=mean; /kd: distil=kd; /cla: classifier=cla.
Reading: W adds logits, so a class's vectors add up to a plain head, and that head is the model's.
Reading: n^k is by the fine classes of the round's start.
Departure: every batch of B samples holds all P^g, with sum I = rho B.
Departure: t counts from 0, or L_dcl would end at weight 0; P^k has no weight decay.
Departure: a class without any P^g starts from k-means in whichever round it appears.
Departure: a fine class that nobody has keeps its P^g, with I = 0; one without P^g is averaged by samples.
Omission: W over probabilities, which no plain head can express; matching the clients' clusters in the first round.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from fedskew.core.fit import fit
from fedskew.core.losses import decoupled, imitation
from fedskew.core.method import MODEL, Method, Update, mean_of, overlay
from fedskew.core.net import Net
from fedskew.core.settings import UsageError
from fedskew.core.site import Loss, Site, copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, NotNegative, Positive, Share
from fedskew.methods._shared.prototypes import GROUP, Pool, class_means
from fedskew.methods.fedcd.subclasses import (
    FINE,
    FineHead,
    adaptive,
    assigned,
    combined,
    contrast,
    fold,
    hierarchy,
    lloyd,
    log_quality,
    most_similar,
    of_class_means,
    spread,
    unfold,
)

Sent = tuple[Tensors, Tensor, float]  # a client's phi_k, n^k and n_k
Mass = NotNegative | Literal["paper"]
Weight = Annotated[float, Meta(ge=0, le=1)] | Literal["linear"]


class Preset(NamedTuple):
    """What a field is that is left None."""

    mu: Weight
    rho: Mass
    counts: bool
    kmeans_refresh: bool


PRESETS = {"robust": Preset(0.9, 0.1, True, True), "paper": Preset("linear", "paper", False, False)}


@dataclass(frozen=True)
class FedCD(Method):
    preset: Literal["robust", "paper"] = "robust"  # ours; paper: as printed, see above
    M: Count = 3  # the paper's
    alpha: Share = 0.1  # the paper's
    tau: Positive = 1.0  # the paper's
    xi: NotNegative = 0.5  # the paper's on CIFAR-10; 8 on CIFAR-100 and EMNIST
    gamma: NotNegative = 0.1  # the paper's
    lam: NotNegative = 0.1  # the paper's lambda
    mu: Weight | None = None  # None: the preset's 0.9, the same in all rounds, or the paper's linear
    rho: Mass | None = None  # None: the preset's 0.1 or paper: sum n^g / n_k, which is Eq. 5's and grows with clients
    hpc: bool = True  # the paper's; False: no L_hpc, P^k_j the mean feature of its samples
    distil: Literal["dkd", "kd"] = "dkd"  # the paper's; kd: KL over all classes
    classifier: Literal["acla", "norm", "cla", "mean"] = "acla"  # the paper's; nu = q / sum q, n^k_j / n_j or n_k / n
    acla_temp: Positive = 1.0  # the paper's, softmax of q / acla_temp
    counts: bool | None = None  # acla and norm: nu is times n^k_j as well; None: the preset's
    assign: Literal["round", "batch"] = "round"  # ours; batch: Eq. 2 anew for each batch
    kmeans_refresh: bool | None = None  # the first round sends centres of the trained features; None: the preset's
    rescale: bool = False  # ours: P^k_j is sent with the mean norm of its samples' features
    bias: bool = False  # the paper's phi has none

    def init_server(self, site: Site) -> Payload:
        if not isinstance(site.net.head, nn.Linear):
            raise UsageError("fedcd needs a net whose head is one linear layer, such as simple-cnn.")
        server, J = super().init_server(site), site.classes * self.M
        folded = fold(spread(site.net.head, self.M, site.rng, bias=self.bias))
        head = Tensors({"head.bias": torch.zeros(site.classes)}) | folded["parameters"]
        none = Tensors(
            mean=torch.zeros(J, site.net.features), count=torch.zeros(J), known=torch.zeros(J, dtype=torch.bool)
        )
        return server | {"parameters": server["parameters"] | head, FINE: folded[FINE], GROUP: none}

    def broadcast(self, server: Payload) -> Payload:
        return server

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        fine, own = assigned(site.infer(site.net.body), site.data.labels, broadcast[GROUP], self.M, site.rng)
        head = FineHead(unfold(broadcast), own["mean"]).to(site.device)
        labels = site.data.y.index_put((site.data.index,), fine)
        inner = replace(site, net=Net(site.net.body, head, site.net.features), data=replace(site.data, y=labels))
        moving = ("body.", "head.") if self.contrasts(site) else ("body.", "head.weight", "head.bias")
        done = fit(inner, self.loss(site, broadcast, head, own["known"]), train=moving)
        folded = fold(head.phi())
        site.net.load_state_dict(folded["parameters"], strict=False)
        sent = self.prototypes(site, copied(head.prototypes), fine)
        return self.report(site, {"loss": done.loss}).plus(**{FINE: folded[FINE], GROUP: sent}), state | site.keeps()

    def chosen(self, field: str) -> Any:
        """A field's value, or the preset's."""
        value = getattr(self, field)
        return getattr(PRESETS[self.preset], field) if value is None else value

    def mu_at(self, site: Site) -> float:
        mu: Weight = self.chosen("mu")
        return 1 - site.round / site.rounds if isinstance(mu, str) else mu

    def contrasts(self, site: Site) -> bool:
        return self.hpc and self.mu_at(site) < 1

    def loss(self, site: Site, broadcast: Payload, head: FineHead, known: Tensor) -> Loss:
        """Eq. 11, of batches whose labels are fine classes."""
        M, mu, contrasts, decay = self.M, self.mu_at(site), self.contrasts(site), site.training.weight_decay
        g = Tensors({name: t.to(site.device) for name, t in broadcast[GROUP].items()})
        phi_g = [broadcast["parameters"][f"head.{name}"].to(site.device) for name in ("weight", "bias")]
        P, known = head.prototypes.detach().clone(), known.to(site.device)
        factors = hierarchy(known, M, self.alpha)
        n, appended = float(g["count"].sum()), g["count"].nonzero().flatten()
        P_g, share = g["mean"][appended], g["count"][appended] / n
        rho: Mass = self.chosen("rho")
        rho = 0.0 if n == 0 else n / len(site.data) if isinstance(rho, str) else rho

        def loss(net: Net, x: Tensor, fine: Tensor) -> Tensor:
            z, B = net.body(x), len(fine)
            if self.assign == "batch":
                fine = most_similar(z.detach(), fine // M, P, known, M)
            if rho:
                z, fine = torch.cat([z, P_g]), torch.cat([fine, appended])
            c, u, u_g = fine // M, head(z), linear(z, *phi_g)
            values = mu * cross_entropy(u, c, reduction="none")
            if contrasts:
                values = values + (1 - mu) * contrast(z, fine, head.prototypes, factors, self.tau)
            if self.lam:
                values = values + self.lam * self.distilled(u, u_g, c)
            total = values[:B].mean()
            if rho:
                total = (total + rho * (share @ values[B:])) / (1 + rho)
            if self.gamma:
                total = total + self.gamma * of_class_means(u_g[:B], c[:B])
            if contrasts and decay:  # takes back the optimiser's decay of P^k; its value is 0
                square = head.prototypes.square().sum()
                total = total + decay / 2 * (square.detach() - square)
            return total

        return loss

    def distilled(self, student: Tensor, teacher: Tensor, c: Tensor) -> Tensor:
        if self.distil == "kd":
            return imitation(student, teacher, reduction="none")
        target, others = decoupled(student, teacher, c)
        return target + self.xi * others

    def prototypes(self, site: Site, P: Tensor, fine: Tensor) -> Tensors:
        """P^k and n^k as they are sent."""
        refresh = self.chosen("kmeans_refresh") and site.round == 0
        own = Tensors(mean=P, count=torch.bincount(fine, minlength=len(P)).float())
        if self.hpc and not refresh and not self.rescale:
            return own
        z = site.infer(site.net.body)
        if refresh:
            fine = lloyd(z, site.data.labels, fine, site.classes, self.M)
        if refresh or not self.hpc:
            own = class_means(z, fine, len(P))
        if self.rescale:
            norm = class_means(z.norm(dim=1, keepdim=True), fine, len(P))["mean"]
            own["mean"] = normalize(own["mean"], dim=1) * norm
        return own

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        pool, sent = Pool(server[GROUP]), list[Sent]()

        def noted() -> Iterator[Update]:  # of every client only the classifier is kept
            for update in pool.watch(updates):
                if self.classifier != "mean":
                    sent.append((unfold(update.payload), update.payload[GROUP]["count"], update.weight))
                yield update

        fresh = mean_of(noted(), groups=(*MODEL, FINE))
        g = pool.value() | {"count": pool.count.float(), "known": server[GROUP]["known"] | (pool.count > 0)}
        if sent:
            fresh |= overlay(fresh, fold(self.combine(sent, g)))
        return server | overlay(server, fresh) | {GROUP: g}

    def combine(self, sent: list[Sent], g: Tensors) -> Tensors:
        """Eq. 15 with the new P^g."""
        phis, counts, sizes = zip(*sent, strict=True)
        n_k, sound = torch.stack(counts).double(), g["count"] > 0
        if self.classifier == "cla":
            nu = n_k / n_k.sum(0)
        else:
            log_q = torch.stack([log_quality(phi, g["mean"]) for phi in phis]).double()
            nu = adaptive(log_q, self.acla_temp, norm=self.classifier == "norm")
            if self.chosen("counts"):
                nu = n_k * nu / (n_k * nu).sum(0)
            else:
                sound = g["known"]
        n = torch.tensor(sizes, dtype=torch.float64)[:, None]
        nu = torch.where(sound, nu, n / n.sum()).view(len(sent), -1, self.M)
        return combined(phis, nu)
