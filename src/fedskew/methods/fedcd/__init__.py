"""FedCD: A Classifier Debiased Federated Learning Framework for Non-IID Data.

Long, Xue, Chu, Zhang, Wu, Zang, Du. ACM MM 2023. doi:10.1145/3581783.3611966

A class c has M fine classes j = (c, m), each with a prototype P_j and a class-vector phi^j. z = f(x; theta).
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
Preset paper: as printed, with Algorithm 1's batches of D_k^+, the samples and all P^g: a prototype is one item of an
epoch, so most batches hold none (68 % at the paper's scale), and one that is there weighs n_j samples.
Preset robust: rho = 0.1, mu = 0.9 in all rounds, class-vectors by counts (cla), gradients clipped to norm 5. What was
tried: results/fedcd-fmnist.
-hpc: hpc=false; -dkd: lam=0; -bpr: gamma=0; -acla: classifier=mean; /kd: distil=kd; /cla: classifier=cla.
W=logits: u adds the M logits of a class. Its M vectors then get identical gradients and differ by their start only: a
plain head with M times the learning rate, which without clip diverges at rates that FedAvg bears. W=probabilities: u
adds probabilities, so a class's logit is the logsumexp of its M, and they do specialise.
Eq. 14's weights of two clients differ by a factor of e at most, so acla is close to a uniform mean over clients.
Reading: n^k counts the fine classes as assigned at the start of the round.
Reading: P^k of the first round are k-means centres of the trained features. Under the initial net the means of all
classes are nearly one vector, and L_hpc, which only turns prototypes, keeps the lengths that they start with.
Reading: in a batch of B of n_k samples each P^g_j is drawn with probability B / n_k, in addition to the samples.
Departure (rho a number): every batch holds all P^g, with sum I = rho B.
Departure (clip a number): a step's gradient has at most this norm, unless training.clip gives another.
Departure: t counts from 0, otherwise L_dcl would end with weight 0.
Departure: P^k has no weight decay, or a part of it in steps that are clipped.
Departure: a class without any P^g starts from k-means in the round in which it first appears.
Departure: a fine class that no client has keeps its P^g, with I = 0; phi^j without a P^g_j is averaged by samples.
Omission: matching of the clients' clusters in the first round.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedskew.core.fit import fit
from fedskew.core.losses import decoupled, imitation
from fedskew.core.method import Method, Paper, Update, mean_of, overlay
from fedskew.core.net import Net
from fedskew.core.settings import UsageError, setting
from fedskew.core.site import Loss, Site, copied
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, NotNegative, Positive, Share, Training
from fedskew.methods._shared.prototypes import GROUP, PrototypeMean, class_means, enough
from fedskew.methods.fedcd.subclasses import (
    GuidedHead,
    Over,
    assign_fine_classes,
    client_weights,
    combine_classifiers,
    drawn_prototypes,
    hierarchical_contrast,
    hierarchy,
    lloyd,
    log_quality,
    most_similar,
    of_class_means,
    split_head,
)

Sent = tuple[Tensors, Tensor, float]  # a client's phi_k, n^k and n_k
Mass = NotNegative | Literal["paper"]
Weight = Annotated[float, Meta(ge=0, le=1)] | Literal["linear"]
Classifier = Literal["acla", "norm", "cla", "mean"]
Clip = Positive | Literal["off"]


class Preset(NamedTuple):
    """Values of the fields that are left None."""

    mu: Weight
    rho: Mass
    classifier: Classifier
    clip: Clip


PRESETS = {"robust": Preset(0.9, 0.1, "cla", 5.0), "paper": Preset("linear", "paper", "acla", "off")}


@dataclass(frozen=True)
class FedCD(Method):
    """Splits each class into fine classes with prototypes and debiases the classifier with them."""

    paper = Paper(
        title="FedCD: A Classifier Debiased Federated Learning Framework for Non-IID Data",
        authors="Long, Xue, Chu, Zhang, Wu, Zang, Du",
        venue="ACM MM 2023",
        link="doi:10.1145/3581783.3611966",
    )
    formula = (
        r"P^g_j &= \frac{\sum_k n^k_j P^k_j}{\sum_k n^k_j}, \qquad s_j = \exp(\cos(z, P^k_j) / \tau) \\ "
        r"\omega &= \frac{s_{c,t}}{s_{c,t} + \alpha \sum_{m \ne t} s_{c,m} + (1 - \alpha) \sum_{c' \ne c} \sum_m "
        r"s_{c',m}}, \qquad L_{hpc} = -\mathrm{mean} \, \log \omega \\ "
        r"L &= \mu L_{dcl} + (1 - \mu) L_{hpc} + \gamma L_{bpr} + \lambda L_{gid} \\ "
        r"\phi^j &= \sum_k \nu^j_k \, \phi^j_k"
    )
    terms_off = {
        "M": 1,
        "gamma": 0.0,
        "lam": 0.0,
        "rho": 0.0,
        "mu": 1.0,
        "classifier": "mean",
        "clip": "off",
        "bias": True,
    }
    sums_only = False

    preset: Literal["robust", "paper"] = setting(
        "robust",
        help="Defaults of mu, rho, classifier and clip: paper as printed, see above.",
        source="our choice",
    )
    M: Count = setting(3, help="Fine classes per class.", source="the paper")
    alpha: Share = setting(0.1, help="Weight in Eq. 3 of the other fine classes of the same class.", source="the paper")
    tau: Positive = setting(1.0, help="Temperature of L_hpc.", source="the paper")
    xi: NotNegative = setting(
        0.5, help="Weight of NCKD in L_gid.", source="the paper's for CIFAR-10; it has 8 for CIFAR-100 and EMNIST"
    )
    gamma: NotNegative = setting(0.1, help="Weight of L_bpr; 0: off.", source="the paper", search=(0.01, 1.0))
    lam: NotNegative = setting(0.1, help="lambda, the weight of L_gid; 0: off.", source="the paper", search=(0.01, 1.0))
    mu: Weight | None = setting(
        None,
        help="Share of L_dcl in L_dcl + L_hpc; linear: 1 - t/T, 1: no L_hpc, None: the preset's, 0.9 or linear.",
        source="the preset; linear is the paper's",
    )
    rho: Mass | None = setting(
        None,
        help="Weight of all P^g in every batch, relative to its samples; 0: none, paper: Algorithm 1's batches, "
        "None: the preset's, 0.1 or paper.",
        source="the preset",
    )
    hpc: bool = setting(True, help="Use L_hpc; False: P^k_j is the mean feature of its samples.", source="the paper")
    distil: Literal["dkd", "kd"] = setting(
        "dkd", help="L_gid: decoupled distillation, or KL over all classes.", source="the paper"
    )
    classifier: Classifier | None = setting(
        None,
        help="Weights nu of Eq. 15: softmax of q (acla), q / sum q (norm), n^k_j / n_j (cla) or n_k / n (mean); "
        "None: the preset's, cla or acla.",
        source="the preset; acla is the paper's",
    )
    acla_temp: Positive = setting(1.0, help="Temperature of the softmax of Eq. 14.", source="the paper")
    W: Over = setting("logits", help="What u adds over the fine classes of a class.", source="the paper, as we read it")
    clip: Clip | None = setting(
        None,
        help="Largest norm of a step's gradient where training.clip is not set; off: no limit, "
        "None: the preset's, 5 or off.",
        source="the preset; off is the paper's",
    )
    assign: Literal["round", "batch"] = setting(
        "round", help="When samples get their fine class (Eq. 2): once a round, or in every batch.", source="our choice"
    )
    rescale: bool = setting(
        False, help="True: send P^k_j with the mean norm of its samples' features.", source="the paper; True is ours"
    )
    bias: bool = setting(False, help="Whether phi has a bias.", source="the paper")

    def prepare(self, net: Any, rng: torch.Generator) -> Any:
        if not isinstance(net.head, nn.Linear):
            raise UsageError("fedcd needs a model whose head is one linear layer, such as simple-cnn.")
        net.head = split_head(net.head, self.M, rng, bias=self.bias, over=self.W)
        return net

    def init_server(self, site: Site) -> Payload:
        J = site.classes * self.M
        none = Tensors(
            mean=torch.zeros(J, site.net.features), count=torch.zeros(J), known=torch.zeros(J, dtype=torch.bool)
        )
        return super().init_server(site) | {GROUP: none}

    @property
    def depends_on_rounds(self) -> bool:
        return isinstance(self.chosen("mu"), str)  # linear

    def broadcast(self, server: Payload) -> Payload:
        return server

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast, state)
        fine, own = assign_fine_classes(site.infer(site.net.body), site.data.labels, broadcast[GROUP], self.M, site.rng)
        head = GuidedHead(site.net.head, own["mean"]).to(site.device)
        labels = site.data.y.index_put((site.data.index,), fine)
        fine_site = replace(site, net=Net(site.net.body, head, site.net.features), data=replace(site.data, y=labels))
        moving = ("body.", "head.") if self.contrasts(site) else ("body.", "head.head.")
        loss = self.loss(site, broadcast, head, own["known"])
        done = fit(fine_site, loss, train=moving, training=self.clipped(site.training))
        sent = enough(self.prototypes(site, copied(head.prototypes), fine), site.min_count)
        return self.report(site, {"loss": done.loss}).plus(**{GROUP: sent}), state | site.keeps()

    def chosen(self, field: str) -> Any:
        """The value of a field, or the preset's if it is None."""
        value = getattr(self, field)
        return getattr(PRESETS[self.preset], field) if value is None else value

    def clipped(self, training: Training) -> Training:
        """The training with this method's clip, unless it has its own."""
        clip: Clip = self.chosen("clip")
        return training if training.clip or isinstance(clip, str) else replace(training, clip=clip)

    def mu_at(self, site: Site) -> float:
        """mu in the site's round."""
        mu: Weight = self.chosen("mu")
        return 1 - site.round / site.rounds if isinstance(mu, str) else mu

    def contrasts(self, site: Site) -> bool:
        """Whether L_hpc has a weight in the site's round."""
        return self.hpc and self.mu_at(site) < 1

    def loss(self, site: Site, broadcast: Payload, head: GuidedHead, known: Tensor) -> Loss:
        """The loss of Eq. 11, for batches whose labels are fine classes."""
        M, mu, contrasts, decay = self.M, self.mu_at(site), self.contrasts(site), site.training.weight_decay
        g = Tensors({name: t.to(site.device) for name, t in broadcast[GROUP].items()})
        phi_g = site.frozen(broadcast).head
        P, known = head.prototypes.detach().clone(), known.to(site.device)
        factors = hierarchy(known, M, self.alpha)

        def loss(net: Net, x: Tensor, fine: Tensor) -> Tensor:
            z, B = net.body(x), len(fine)
            if self.assign == "batch":
                fine = most_similar(z.detach(), fine // M, P, known, M)
            appended, importance = self.appended(site, g["count"], B)
            if len(appended):
                z, fine = torch.cat([z, g["mean"][appended]]), torch.cat([fine, appended])
            c, u = fine // M, head(z)
            values = mu * cross_entropy(u, c, reduction="none")
            if contrasts:
                values = values + (1 - mu) * hierarchical_contrast(z, fine, head.prototypes, factors, self.tau)
            if self.lam:
                values = values + self.lam * self.distilled(u, phi_g(z), c)
            total = values[:B].mean()
            if len(appended):
                total = (B * total + importance @ values[B:]) / (B + importance.sum())
            if self.gamma:
                total = total + self.gamma * of_class_means(z[:B], c[:B], site.classes, phi_g)
            if contrasts and decay:  # its value is 0, its gradient cancels the optimiser's weight decay of P^k
                square = head.prototypes.square().sum()
                total = total + decay / 2 * (square.detach() - square)
            return total

        return loss

    def appended(self, site: Site, count: Tensor, B: int) -> tuple[Tensor, Tensor]:
        """The prototypes in a batch of B samples, and their importance I, from the counts n^g."""
        rho: Mass = self.chosen("rho")
        if isinstance(rho, str):
            here = drawn_prototypes(count, B, len(site.data), site.rng)
            return here, count[here]
        here = count.nonzero().flatten() if rho else count.new_empty(0, dtype=torch.int64)
        return here, rho * B * count[here] / count.sum()

    def distilled(self, student: Tensor, teacher: Tensor, c: Tensor) -> Tensor:
        """The terms of L_gid, one value per sample."""
        if self.distil == "kd":
            return imitation(student, teacher, reduction="none")
        target, others = decoupled(student, teacher, c)
        return target + self.xi * others

    def prototypes(self, site: Site, P: Tensor, fine: Tensor) -> Tensors:
        """P^k and n^k as sent to the server, from the trained prototypes P and the samples' fine classes."""
        own, first = Tensors(mean=P, count=torch.bincount(fine, minlength=len(P)).float()), site.round == 0
        if self.hpc and not first and not self.rescale:
            return own
        z = site.infer(site.net.body)
        if first:
            fine = lloyd(z, site.data.labels, fine, site.classes, self.M)
        if first or not self.hpc:
            own = class_means(z, fine, len(P))
        if self.rescale:
            norm = class_means(z.norm(dim=1, keepdim=True), fine, len(P))["mean"]
            own["mean"] = normalize(own["mean"], dim=1) * norm
        return own

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        pool, sent = PrototypeMean(server[GROUP]), list[Sent]()

        def noted() -> Iterator[Update]:  # keeps the classifier of every client
            for update in pool.watch(updates):
                if self.chosen("classifier") != "mean":
                    phi = update.payload["parameters"].split("head.")[1]
                    sent.append((phi, update.payload[GROUP]["count"], update.weight))
                yield update

        fresh = mean_of(noted())
        g = pool.value() | {"count": pool.count.float(), "known": server[GROUP]["known"] | (pool.count > 0)}
        if sent:
            fresh["parameters"] |= self.combine(sent, g)
        return server | overlay(server, fresh) | {GROUP: g}

    def combine(self, sent: list[Sent], g: Tensors) -> Tensors:
        """phi of Eq. 15, with the new P^g."""
        phis, counts, sizes = zip(*sent, strict=True)
        n, classifier = torch.tensor(sizes, dtype=torch.float64)[:, None], self.chosen("classifier")
        if classifier == "cla":
            n_k, sound = torch.stack(counts).double(), g["count"] > 0
            nu = n_k / n_k.sum(0)
        else:
            log_q, sound = torch.stack([log_quality(phi, g["mean"]) for phi in phis]).double(), g["known"]
            nu = client_weights(log_q, self.acla_temp, norm=classifier == "norm")
        return combine_classifiers(phis, torch.where(sound, nu, n / n.sum()))
