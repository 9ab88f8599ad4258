"""Loss terms that several methods share: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize, softmax


def plain(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, the loss of FedAvg."""
    return cross_entropy(net(x), y)


@dataclass(frozen=True)
class OfLogits:
    """A loss that depends on the net through its logits alone, such as distillation.

    `fit` then differentiates the layers of a net it knows by hand, and only `of` by autograd: bits are the same.

    of: (logits, y) -> loss. It must not draw from torch's global generator.
    slope: (logits, y) -> the loss and its gradient with respect to the logits, written out; None: by autograd.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __call__(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.of(net(x), y)


def proximal(parameters: Iterable[tuple[str, Tensor]], anchor: Mapping[str, Tensor]) -> Tensor:
    """|w - anchor|^2, summed over the named parameters."""
    return torch.stack([(p - anchor[name].to(p.device)).square().sum() for name, p in parameters]).sum()


def inner(parameters: Iterable[tuple[str, Tensor]], direction: Mapping[str, Tensor]) -> Tensor:
    """<w, direction>, summed over the named parameters; its gradient is the direction."""
    return torch.stack([(p * direction[name].to(p.device)).sum() for name, p in parameters]).sum()


@dataclass(frozen=True)
class Corrected:
    """The loss plus <w, tilt> + strength/2 |w - anchor|^2, two terms that do not depend on the data.

    `fit` adds the gradient of the two terms without autograd, which makes the step of a small net a fifth cheaper and
    is bit-identical to calling this.

    loss: (net, x, y) -> loss.
    tilt: a direction by parameter name; None: no such term.
    anchor, strength: the point that parameters are drawn to, and how strongly; None: no such term.
    """

    loss: Callable[[Any, Tensor, Tensor], Tensor]
    tilt: Mapping[str, Tensor] | None = None
    anchor: Mapping[str, Tensor] | None = None
    strength: float = 0.0

    def __call__(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        total = self.loss(net, x, y)
        if self.tilt is not None:
            total = total + inner(net.named_parameters(), self.tilt)
        if self.anchor is not None:
            total = total + self.strength / 2 * proximal(net.named_parameters(), self.anchor)
        return total


def imitation(student: Tensor, teacher: Tensor, temperature: float = 1.0, reduction: str = "batchmean") -> Tensor:
    """Distillation: KL(teacher || student) of logits / temperature; no gradient goes to the teacher.

    reduction: as in torch's kl_div; "none" gives one value per sample.
    """
    log_p = log_softmax(student / temperature, dim=1)
    q = softmax(teacher.detach() / temperature, dim=1)
    if reduction == "none":
        return kl_div(log_p, q, reduction="none").sum(1)
    return kl_div(log_p, q, reduction=reduction)


def decoupled(student: Tensor, teacher: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Decoupled distillation (Zhao et al., CVPR 2022): TCKD and NCKD, one value per sample each.

    KD = TCKD + (1 - p_target) NCKD. Sums over the other classes are in the log domain, so large logits stay finite.
    """
    target, rest = y[:, None], torch.arange(student.shape[1] - 1, device=y.device)
    rest = rest + (rest >= target)  # [batch, classes - 1], the classes other than the target

    def parts(logits: Tensor) -> tuple[Tensor, Tensor]:
        others = logits.gather(1, rest)
        return torch.cat([logits.gather(1, target), others.logsumexp(1, keepdim=True)], dim=1), others

    (target_s, others_s), (target_t, others_t) = parts(student), parts(teacher)
    return imitation(target_s, target_t, reduction="none"), imitation(others_s, others_t, reduction="none")


def supervised_contrast(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """SupCon (Khosla et al., NeurIPS 2020, L_out): the mean over samples i of

    -1/|P_i| sum over p in P_i of log softmax_{a != i}(<z_i, z_a> / tau)[p]

    P_i: the other samples of i's class; the term is 0 where there are none.
    z: features, normalised here. tau: temperature.
    """
    z, itself = normalize(z, dim=1), torch.eye(len(y), dtype=torch.bool, device=y.device)
    log_p = (z @ z.T / tau).masked_fill(itself, -torch.inf).log_softmax(1)
    positive = (y[:, None] == y) & ~itself
    return -(torch.where(positive, log_p, 0.0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def alignment(z: Tensor, y: Tensor, z_v: Tensor, y_v: Tensor, tau: float) -> Tensor:
    """Pull real features z to virtual ones z_v of their class: SupCon of both, without gradient to z_v, plus 0.1 SupCon
    of z_v alone. As in the authors' code of VHL and of FedPG.
    """
    together = supervised_contrast(torch.cat([z, z_v.detach()]), torch.cat([y, y_v]), tau)
    return together + 0.1 * supervised_contrast(z_v, y_v, tau)
