"""Work on the server's public set D0: what frozen models say of it, and models that learn from them there.

A frozen model's features and logits are computed once a round, one model at a time, on D0 as it is; a batch finds its
rows of them by the positions it carries in place of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.core.fit import batches, fit
from fedskew.core.method import MODEL
from fedskew.core.net import outputs
from fedskew.core.samples import Data
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training

Lesson = Callable[[Tensor, Tensor, Tensor], Tensor]  # (student's logits, teacher's, labels) -> scalar


class View(NamedTuple):
    """What a frozen model says of a site's data."""

    features: Tensor  # [n, d]
    logits: Tensor  # [n, classes]


def view(site: Site, model: Payload) -> View:
    """In evaluation mode, nothing augmented. A model without batch-norm statistics goes by the batch's."""
    site.load(model)
    net, lacks = site.net, site.training.batch_norm == "local"

    def both(x: Tensor) -> Tensor:
        z = net.body(x)
        return torch.cat([z, net.head(z)], 1)

    said = site.infer(lambda x: outputs(net, both, x, batch_statistics=lacks))
    return View(*said.tensor_split([-site.classes], 1))


def mean_features(views: Iterable[View]) -> Tensor:
    """Over models, one held at a time."""
    total, count = torch.zeros(()), 0
    for each in views:
        total, count = total + each.features, count + 1
    return total / count


def on_server(site: Site, **settings: Any) -> Training:
    """The settings of a phase on the server; of the clients' it keeps augmentation and what becomes of batch norm."""
    return Training(augment=site.training.augment, batch_norm=site.training.batch_norm, **settings)


def trained(
    site: Site, model: Payload, loss: Loss, training: Training, steps: int | None = None, *, train: str = ""
) -> Payload:
    """The model after `steps` on the site's data (None: as long as the settings say), as a site would share it."""
    site.load(model)
    fit(site, loss, train=train, steps=steps, training=training)
    return site.shares()


def taught(
    site: Site, model: Payload, teacher: Tensor, lesson: Lesson, training: Training, steps: int | None = None
) -> Payload:
    """`trained` on a lesson; `teacher` [n, classes] are the teacher's logits of the site's data."""
    teacher, labels = teacher.to(site.device), site.data.labels.to(site.device)

    def loss(net: Any, x: Tensor, row: Tensor) -> Tensor:
        return lesson(net(x), teacher[row], labels[row])

    positions = site.data.y.index_put((site.data.index,), torch.arange(len(site.data)))
    return trained(replace(site, data=replace(site.data, y=positions)), model, loss, training, steps)


def kept(name: str, models: Sequence[Payload]) -> Payload:
    """Models as groups of the server's state, stacked tensor by tensor."""
    return {
        f"{name}.{group}": Tensors({n: torch.stack([m[group][n] for m in models]) for n in models[0][group]})
        for group in models[0]
    }


def restored(name: str, server: Payload) -> list[Payload]:
    """The models that `kept` put away."""
    groups = {group: server[f"{name}.{group}"] for group in MODEL if f"{name}.{group}" in server}
    count = len(next(iter(groups["parameters"].values())))
    return [{g: Tensors({n: t[k] for n, t in ts.items()}) for g, ts in groups.items()} for k in range(count)]


# --- calibration: a few named tensors over frozen logits, trained by an Adam that outlives the round


def calibrated(c: Mapping[str, Tensor], z: Tensor, z_cr: Tensor, gate: Tensor) -> Tensor:
    """s (a z + b) + (1 - s) z_cr with s = sigmoid(gate), one for each sample; a, b class by class."""
    s = gate.sigmoid()[:, None]
    return s * (c["a"] * z + c["b"]) + (1 - s) * z_cr


def no_moments(values: Tensors) -> Tensors:
    """What Adam remembers before its first step."""
    empty = {f"{name}.{moment}": torch.zeros_like(t) for name, t in values.items() for moment in ("mean", "square")}
    return Tensors(empty) | {"step": torch.zeros(())}


def calibrate(
    site: Site,
    values: Tensors,
    moments: Tensors,
    loss: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    *,
    lr: float,
    batch: int,
    steps: int,
) -> tuple[Tensors, Tensors]:
    """The values after `steps` of Adam on loss(values, rows), rows a batch of positions in the site's data.

    Not `fit`: a net's optimiser starts anew with each call, this one goes on from its moments.
    """
    own = {name: t.clone().requires_grad_() for name, t in values.items()}
    adam = torch.optim.Adam(own.values(), lr=lr)
    for name, t in own.items():
        mean, square = moments[f"{name}.mean"].clone(), moments[f"{name}.square"].clone()
        adam.state[t] = {"step": moments["step"].clone(), "exp_avg": mean, "exp_avg_sq": square}
    positions = torch.arange(len(site.data))
    rows = replace(site, data=Data(positions[:, None], positions, positions), device="cpu")
    for _, row in batches(rows, Training(batch_size=batch), steps=steps):
        adam.zero_grad()
        loss(own, row).backward()  # type: ignore[no-untyped-call]
        adam.step()
    after = {name: adam.state[t] for name, t in own.items()}
    fresh = Tensors({f"{name}.mean": s["exp_avg"] for name, s in after.items()})
    fresh |= {f"{name}.square": s["exp_avg_sq"] for name, s in after.items()}
    step = next(iter(after.values()))["step"]
    return Tensors({n: t.detach() for n, t in own.items()}), moments | fresh | {"step": step}


# --- the classifier


def last_linear(net: nn.Module) -> str:
    """The name of the layer that makes the logits."""
    names: list[str] = [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]
    return names[-1]
