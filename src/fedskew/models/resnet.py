"""Residual nets: ResNet-8 (FEDIC, CReFF), ResNet-18 and ResNet-50 (He et al., CVPR 2016).

The CIFAR stem is one 3x3 convolution, no pool; the projection is MOON's (d-d-256). ResNet-50 strides on its 3x3.
ResNet-8 has 6n + 2 layers with n = 1; `width` 64 is the federated papers' "scaling 4", 16 the literal net.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from fedskew.core.net import Net, Shape, image_shape
from fedskew.models.layers import Layers
from fedskew.models.net import dense

Path = Callable[[int, int, int, Layers], list[nn.Module]]


@dataclass(frozen=True)
class ResNet8Options:
    """width: channels of the first stage; the others have twice and four times as many."""

    width: Annotated[int, Meta(ge=2, multiple_of=2)] = 64


@dataclass(frozen=True)
class ResNetOptions:
    """stem: "cifar" for small images, "imagenet" (7x7, stride 2, pool) for large ones; projection: add MOON's."""

    stem: Literal["cifar", "imagenet"] = "cifar"
    projection: bool = False


class Residual(nn.Module):
    """ReLU of a path plus its shortcut: the input, or its 1x1 convolution where the shape changes."""

    def __init__(self, path: list[nn.Module], inputs: int, outputs: int, stride: int, layers: Layers) -> None:
        super().__init__()
        self.path = nn.Sequential(*path)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*conv_norm(inputs, outputs, 1, stride, layers))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet8(shape: Shape, classes: int, options: ResNet8Options, layers: Layers) -> Net:
    """Three stages of one basic block, convolutions initialised as He et al. (FEDIC, CReFF)."""
    channels, _, _ = image_shape("resnet8", shape)
    stem = _relu(conv_norm(channels, options.width, 3, 1, layers))
    body = nn.Sequential(*stem, *_stages(basic, (1, 1, 1), options.width, 1, layers), *_average())
    for layer in body.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    features = 4 * options.width
    return Net(body, nn.Linear(features, classes), features)


def resnet18(shape: Shape, classes: int, options: ResNetOptions, layers: Layers) -> Net:
    """Four stages of two basic blocks."""
    return _resnet("resnet18", basic, (2, 2, 2, 2), 1, shape, classes, options, layers)


def resnet50(shape: Shape, classes: int, options: ResNetOptions, layers: Layers) -> Net:
    """Four stages of 3, 4, 6 and 3 bottleneck blocks."""
    return _resnet("resnet50", bottleneck, (3, 4, 6, 3), 4, shape, classes, options, layers)


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int, layers: Layers) -> list[nn.Module]:
    """A padded convolution and a norm."""
    padding = kernel // 2
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=layers.bias)
    return [convolution, layers.norm(outputs)]


def basic(inputs: int, width: int, stride: int, layers: Layers) -> list[nn.Module]:
    """The path of a basic block: two 3x3 convolutions, the stride on the first."""
    return [*_relu(conv_norm(inputs, width, 3, stride, layers)), *conv_norm(width, width, 3, 1, layers)]


def bottleneck(inputs: int, width: int, stride: int, layers: Layers) -> list[nn.Module]:
    """The path of a bottleneck block: 1x1, 3x3 with the stride, 1x1 to four times the width."""
    return [
        *_relu(conv_norm(inputs, width, 1, 1, layers)),
        *_relu(conv_norm(width, width, 3, stride, layers)),
        *conv_norm(width, 4 * width, 1, 1, layers),
    ]


def _resnet(
    name: str,
    path: Path,
    depths: tuple[int, ...],
    expansion: int,
    shape: Shape,
    classes: int,
    options: ResNetOptions,
    layers: Layers,
) -> Net:
    channels, _, _ = image_shape(name, shape)
    kernel, stride = (3, 1) if options.stem == "cifar" else (7, 2)
    stem = _relu(conv_norm(channels, 64, kernel, stride, layers))
    if options.stem == "imagenet":
        stem.append(nn.MaxPool2d(3, 2, 1))
    body = nn.Sequential(*stem, *_stages(path, depths, 64, expansion, layers), *_average())
    features = 512 * expansion
    if options.projection:
        body.extend(dense((features, features, 256), last_relu=False))
        features = 256
    return Net(body, nn.Linear(features, classes), features)


def _stages(path: Path, depths: tuple[int, ...], width: int, expansion: int, layers: Layers) -> list[nn.Module]:
    """Stages of residual blocks; from the second on, each halves the image's sides and doubles the width."""
    blocks: list[nn.Module] = []
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            outputs = width * expansion
            blocks.append(Residual(path(inputs, width, stride, layers), inputs, outputs, stride, layers))
            inputs = outputs
        width *= 2
    return blocks


def _relu(layers: list[nn.Module]) -> list[nn.Module]:
    return [*layers, nn.ReLU(inplace=True)]


def _average() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
