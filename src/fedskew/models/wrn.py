"""Wide ResNet (Zagoruyko, Komodakis, BMVC 2016), as FedMR trains it: WRN-28-10 with biased convolutions, dropout .3.

The last norm's momentum is .9; the stride is on a block's second convolution and the shortcut reads the block's
input, both as in FedMR's code. `bias=false` gives the textbook's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from fedskew.core.net import Net, Shape, image_shape
from fedskew.models.layers import Layers
from fedskew.models.net import Count


@dataclass(frozen=True)
class WrnOptions:
    """depth: layers, 6n + 4; widen: factor of the width; bias: of the convolutions; dropout: its probability."""

    depth: Annotated[int, Meta(ge=10)] = 28
    widen: Count = 10
    bias: bool = True
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.3

    def __post_init__(self) -> None:
        if self.depth % 6 != 4:
            raise ValueError(f"depth={self.depth} is invalid: expected 6n + 4 (10, 16, 22, 28, ...)")


class Block(nn.Module):
    """norm, ReLU, conv, dropout, norm, ReLU, conv; plus the input, or its 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, options: WrnOptions, layers: Layers) -> None:
        super().__init__()
        bias = options.bias or layers.bias
        self.norm1 = layers.norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
        self.dropout = nn.Dropout(options.dropout)
        self.norm2 = layers.norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=bias)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.conv1(F.relu(self.norm1(x))))
        y = self.conv2(F.relu(self.norm2(y)))
        return cast(Tensor, y + self.shortcut(x))


def wrn(shape: Shape, classes: int, options: WrnOptions, layers: Layers) -> Net:
    """Three stages of (depth - 4) / 6 blocks, of 16, 32 and 64 times `widen` channels."""
    channels, _, _ = image_shape("wrn28-10", shape)
    inputs = 16
    body = nn.Sequential(nn.Conv2d(channels, inputs, 3, padding=1, bias=options.bias or layers.bias))
    for stage in range(3):
        outputs = 16 * options.widen * 2**stage
        for block in range((options.depth - 4) // 6):
            stride = 2 if stage and not block else 1
            body.append(Block(inputs, outputs, stride, options, layers))
            inputs = outputs
    body.extend([layers.norm(inputs, momentum=0.9), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    return Net(body, nn.Linear(inputs, classes), inputs)
