"""Neural nets by name."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from fedskew.core.net import Net, Shape
from fedskew.core.settings import UsageError, choose, unknown
from fedskew.core.settings import build as settle
from fedskew.models import efficientnet, resnet, small, wrn
from fedskew.models.layers import Layers, Norm, channels_last
from fedskew.models.net import Kind, wrap

__all__ = ["REGISTRY", "Kind", "Net", "build", "listing", "wrap"]

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
IMAGES = "images of any size"

REGISTRY: dict[str, Kind] = {
    "mlp": Kind(small.mlp, small.MlpOptions, "McMahan's 2NN; tables, quick trials", "any shape", MNIST, 10),
    "linear": Kind(small.linear, small.LinearOptions, "one layer; heads on frozen features", "any shape", (512,), 10),
    "simple-cnn": Kind(small.simple_cnn, small.SimpleCnnOptions, "MOON, FedCD", "images from 16x16", CIFAR, 10),
    "cnn": Kind(small.cnn, small.CnnOptions, "McMahan's CNN; FedDDC, LEAF", "images from 4x4", MNIST, 10),
    "cnn4": Kind(small.cnn4, small.Cnn4Options, "FedBABU, FedCRC", "images from 16x16", CIFAR, 10, normed=True),
    "convnet5": Kind(
        small.convnet5, small.ConvNet5Options, "FedPG on FEMNIST", "images from 16x16", MNIST, 62, normed=True
    ),
    "resnet8": Kind(resnet.resnet8, resnet.ResNet8Options, "FedDDC, CReFF on CIFAR-LT", IMAGES, CIFAR, 10, normed=True),
    "resnet18": Kind(resnet.resnet18, resnet.ResNetOptions, "FedMR, FedPG, FedCRC", IMAGES, CIFAR, 10, normed=True),
    "resnet50": Kind(
        resnet.resnet50, resnet.ResNetOptions, "FedCD, FedPG on CIFAR-100", IMAGES, CIFAR, 100, normed=True
    ),
    "wrn28-10": Kind(wrn.wrn, wrn.WrnOptions, "FedMR on CIFAR-100", IMAGES, CIFAR, 100, normed=True),
    "efficientnet-b0": Kind(
        efficientnet.efficientnet_b0,
        efficientnet.EfficientNetOptions,
        "FedMR on ISIC2019",
        IMAGES,
        (3, 224, 224),
        8,
        normed=True,
    ),
}


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    seed: int,
    norm: Literal["default", "batch", "group", "none"] = "default",
    fast: bool = True,
    **options: Any,
) -> Net:
    """Build a net.

    name: one of REGISTRY, such as "mlp" or "resnet18".
    shape: of one input, without the batch: (channels, height, width), or any shape for "mlp".
    classes: number of logits.
    seed: decides the initial parameters; torch's global generator is not used.
    norm: "default" is the paper's normalisation; "batch", "group" or "none" replace it, if the net has any.
    fast: use layers that compute the same faster on a CPU; False: torch's own layers.
    options: the net's own, such as hidden="200-100" for "mlp".

    >>> net = build("mlp", (1, 8, 8), 10, seed=0, hidden="32-16")
    >>> net.features, net(torch.zeros(5, 1, 8, 8)).shape
    (16, torch.Size([5, 10]))
    """
    kind = choose("net", name, REGISTRY)
    settings: Any = settle(kind.options, options, name)
    layers = Layers(_norm(name, kind, norm), fast)
    if classes < 1:
        raise UsageError(f"classes={classes} is invalid: expected at least one class.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = kind.make(tuple(shape), classes, settings, layers)
    if fast:
        channels_last(net)
    return net


def listing() -> list[dict[str, str | int]]:
    """One row per net: what it is for, its inputs, and its size for a typical input with default options."""
    rows: list[dict[str, str | int]] = []
    for name, kind in REGISTRY.items():
        with torch.device("meta"):
            net = build(name, kind.typical, kind.classes, seed=0)
        row = {"name": name, "for": kind.about, "input": kind.input, "typical": "x".join(map(str, kind.typical))}
        count = sum(parameter.numel() for parameter in net.parameters())
        rows.append(row | {"classes": kind.classes, "features": net.features, "parameters": count})
    return rows


def _norm(name: str, kind: Kind, norm: str) -> Norm:
    if norm not in ("default", *get_args(Norm)):
        raise unknown("norm", norm, ("default", *get_args(Norm)))
    if norm in ("batch", "group") and not kind.normed:
        raise UsageError(f"norm={norm} is invalid: expected default or none, as {name} has no normalisation layers.")
    return "batch" if norm == "default" else norm  # type: ignore[return-value]
