"""EfficientNet-B0 (Tan, Le, ICML 2019), which FedMR trains on ISIC2019 behind a projection 1280-640.

The activation between the two is not published; here there is none.
Departure: no dropout before the head and no stochastic depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

import torch
from msgspec import Meta
from torch import Tensor, nn

from fedskew.core.net import Net, Shape, image_shape
from fedskew.models.layers import Layers

# expansion, output channels, blocks, stride of the first, kernel
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


@dataclass(frozen=True)
class EfficientNetOptions:
    """projection: width of a linear layer before the head; 0 is none, FedMR has 640."""

    projection: Annotated[int, Meta(ge=0)] = 0


class Squeeze(nn.Module):
    """Squeeze and excite: each channel times a gate in 0..1, computed from the means of all channels."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.SiLU(), nn.Conv2d(hidden, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class MBConv(nn.Module):
    """Widen 1x1, depthwise convolution, squeeze and excite, narrow 1x1; plus the input if its shape is the output's."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int, layers: Layers) -> None:
        super().__init__()
        wide = inputs * expansion
        self.path = nn.Sequential()
        if expansion > 1:
            self.path.extend(_conv(inputs, wide, 1, 1, 1, layers))
        self.path.extend(_conv(wide, wide, kernel, stride, wide, layers))
        self.path.append(Squeeze(wide, inputs // 4))
        self.path.extend(_conv(wide, outputs, 1, 1, 1, layers)[:-1])
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.path(x)
        return cast(Tensor, x + y if self.residual else y)


def efficientnet_b0(shape: Shape, classes: int, options: EfficientNetOptions, layers: Layers) -> Net:
    """The stages of EfficientNet-B0, then a 1x1 convolution to 1280 features."""
    channels, _, _ = image_shape("efficientnet-b0", shape)
    inputs = 32
    body = nn.Sequential(*_conv(channels, inputs, 3, 2, 1, layers))
    for expansion, outputs, blocks, first, kernel in STAGES:
        for block in range(blocks):
            stride = 1 if block else first
            body.append(MBConv(inputs, outputs, expansion, kernel, stride, layers))
            inputs = outputs
    features = 1280
    body.extend([*_conv(inputs, features, 1, 1, 1, layers), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    if options.projection:
        body.append(nn.Linear(features, options.projection))
        features = options.projection
    return Net(body, nn.Linear(features, classes), features)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, groups: int, layers: Layers) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=layers.bias)
    return [convolution, layers.norm(outputs), nn.SiLU(inplace=True)]
