"""Distillation on the server's public set D0: predictions of frozen models, and students that learn from them.

A frozen model's features and logits are computed once a round, one model at a time, without augmentation. While a
student trains, its batches carry positions in D0 instead of labels, which select the matching rows of these logits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedskew.core.fast.by_hand import imitation_slope
from fedskew.core.fast.calibration import Descent, Frozen
from fedskew.core.fit import batches, fit
from fedskew.core.losses import OfLogits, imitation
from fedskew.core.method import MODEL
from fedskew.core.net import outputs
from fedskew.core.samples import Data
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training

DistillationLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (student logits, teacher logits, labels) -> scalar
STEPS, PASSES = 100, 12.5  # of a student: as published, and over the public set


class Predictions(NamedTuple):
    """A frozen model's outputs on a site's data."""

    features: Tensor  # [n, d]
    logits: Tensor  # [n, classes]


def predict(site: Site, model: Payload) -> Predictions:
    """A model's features and logits on the site's data, in evaluation mode, without augmentation.

    With `batch_norm = local` the server has no running statistics, so batch norm uses those of the batch.
    """
    site.load(model)
    net, no_statistics = site.net, site.training.batch_norm == "local"

    def both(x: Tensor) -> Tensor:
        z = net.body(x)
        return torch.cat([z, net.head(z)], 1)

    joined = site.infer(lambda x: outputs(net, both, x, batch_statistics=no_statistics))
    return Predictions(*joined.tensor_split([-site.classes], 1))


def predict_all(site: Site, models: Iterable[Payload]) -> list[Predictions]:
    """`predict` of several models, on all cores of the run.

    Each model is computed by one thread with a net of its own, so results are bit-identical to one after the other.
    """
    if site.cores == 1 or site.device != "cpu":
        return [predict(site, model) for model in models]
    idle: SimpleQueue[Site] = SimpleQueue()
    for _ in range(site.cores):
        idle.put(replace(site, net=copy.deepcopy(site.net)))

    def one(model: Payload) -> Predictions:
        mine = idle.get()
        try:
            return predict(mine, model)
        finally:
            idle.put(mine)

    # a new thread would use all cores for each operation, which changes the order of sums
    with ThreadPoolExecutor(site.cores, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(one, models))


def mean_features(predictions: Iterable[Predictions]) -> Tensor:
    """The mean of the features over models; only one model's features are held at a time."""
    total, count = torch.zeros(()), 0
    for each in predictions:
        total, count = total + each.features, count + 1
    return total / count


def on_server(site: Site, **settings: Any) -> Training:
    """Training settings on the server: those given, with the clients' augmentation and batch-norm policy."""
    return Training(augment=site.training.augment, batch_norm=site.training.batch_norm, **settings)


def imitate(student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """KL(teacher || student), a `DistillationLoss` that does not use the labels."""
    return imitation(student, teacher)


def train_model(
    site: Site, model: Payload, loss: Loss, training: Training, steps: int | None = None, *, train: str = ""
) -> Payload:
    """The model after training on the site's data: parameters, and buffers if they are aggregated.

    `steps` None: as long as `training` says. Only parameters whose names start with `train` move; "" is all.
    """
    site.load(model)
    fit(site, loss, train=train, steps=steps, training=training)
    return site.shares()


def student_steps(site: Site, steps: int | None, batch: int) -> int:
    """Steps of a student on the public set; None: STEPS, but at most PASSES over the set.

    That many passes are what 100 steps of 128 are over the 1,000 public samples of FEDIC and FedDDC. Without the limit
    100 steps on 50 samples are 100 passes, after which the student has forgotten what the clients taught it.
    """
    return min(STEPS, math.ceil(PASSES * math.ceil(len(site.data) / batch))) if steps is None else steps


def train_student(
    site: Site,
    model: Payload,
    teacher: Tensor,
    distillation_loss: DistillationLoss,
    training: Training,
    steps: int | None = None,
) -> Payload:
    """`train_model` with a distillation loss; `teacher` [n, classes] are the teacher's logits on the site's data."""
    teacher, labels = teacher.to(site.device), site.data.labels.to(site.device)

    def of_logits(student: Tensor, row: Tensor) -> Tensor:
        return distillation_loss(student, teacher[row], labels[row])

    slope = (lambda student, row: imitation_slope(student, teacher[row])) if distillation_loss is imitate else None
    positions = site.data.y.index_put((site.data.index,), torch.arange(len(site.data)))
    site = replace(site, data=replace(site.data, y=positions))
    return train_model(site, model, OfLogits(of_logits, slope), training, steps)


def stack_models(name: str, models: Sequence[Payload]) -> Payload:
    """Models as groups `name.parameters` and `name.buffers` of the server's payload, stacked tensor by tensor."""
    return {
        f"{name}.{group}": Tensors({n: torch.stack([m[group][n] for m in models]) for n in models[0][group]})
        for group in models[0]
    }


def unstack_models(name: str, server: Payload) -> list[Payload]:
    """The models that `stack_models` stored under this name."""
    groups = {group: server[f"{name}.{group}"] for group in MODEL if f"{name}.{group}" in server}
    count = len(next(iter(groups["parameters"].values())))
    return [{g: Tensors({n: t[k] for n, t in ts.items()}) for g, ts in groups.items()} for k in range(count)]


# --- calibration: a few named tensors that combine frozen logits, trained with an Adam state kept between rounds


def calibrated(c: Mapping[str, Tensor], z: Tensor, z_cr: Tensor, gate: Tensor) -> Tensor:
    """s (a z + b) + (1 - s) z_cr, with s = sigmoid(gate) per sample and a, b per class."""
    s = gate.sigmoid()[:, None]
    return s * (c["a"] * z + c["b"]) + (1 - s) * z_cr


def no_moments(values: Tensors) -> Tensors:
    """Adam's state before its first step."""
    empty = {f"{name}.{moment}": torch.zeros_like(t) for name, t in values.items() for moment in ("mean", "square")}
    return Tensors(empty) | {"step": torch.zeros(())}


def calibrate(
    site: Site,
    values: Tensors,
    moments: Tensors,
    loss: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    frozen: Frozen | None = None,
    *,
    lr: float,
    batch: int,
    steps: int,
) -> tuple[Tensors, Tensors]:
    """(values, moments) after `steps` of Adam on loss(values, rows); rows are a batch of positions in the site's data.

    frozen: what the loss is computed from, if it is cross entropy of `calibrated` logits: then its derivative is
        written out. None: autograd.

    `fit` is not used because its optimiser starts afresh with each call; this one continues from `moments`.
    """
    positions = torch.arange(len(site.data))
    rows = replace(site, data=Data(positions[:, None], positions, positions), device="cpu")
    drawn = (row for _, row in batches(rows, Training(batch_size=batch), steps=steps))
    if site.fast and frozen is not None:
        descent = Descent(values, moments, lr)
        for row in drawn:
            descent.step(frozen, row)
        tuned, after = descent.result()
        return Tensors(tuned), moments | after
    return calibrate_plainly(values, moments, loss, drawn, lr)


def calibrate_plainly(
    values: Tensors,
    moments: Tensors,
    loss: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    drawn: Iterable[Tensor],
    lr: float,
) -> tuple[Tensors, Tensors]:
    """`calibrate` with torch.optim.Adam and autograd on these batches of positions."""
    tuned = {name: t.clone().requires_grad_() for name, t in values.items()}
    adam = torch.optim.Adam(tuned.values(), lr=lr)
    for name, t in tuned.items():
        mean, square = moments[f"{name}.mean"].clone(), moments[f"{name}.square"].clone()
        adam.state[t] = {"step": moments["step"].clone(), "exp_avg": mean, "exp_avg_sq": square}
    for row in drawn:
        adam.zero_grad()
        loss(tuned, row).backward()  # type: ignore[no-untyped-call]
        adam.step()
    after = {name: adam.state[t] for name, t in tuned.items()}
    fresh = Tensors({f"{name}.mean": s["exp_avg"] for name, s in after.items()})
    fresh |= {f"{name}.square": s["exp_avg_sq"] for name, s in after.items()}
    step = next(iter(after.values()))["step"]
    return Tensors({n: t.detach() for n, t in tuned.items()}), moments | fresh | {"step": step}
