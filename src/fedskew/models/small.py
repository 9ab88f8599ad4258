"""Small nets: perceptron, McMahan's and MOON's convolutional nets, FedCRC's and FedPG's.

McMahan et al., AISTATS 2017 (mlp is their 2NN, cnn their CNN); Li, He, Song (MOON), CVPR 2021 (simple-cnn);
Oh, Kim, Yun (FedBABU), ICLR 2022 (cnn4, used by FedCRC); FederatedScope's ConvNet5 (convnet5, used by FedPG).
Departure: convnet5 has no fifth pool for images below 32 px, where one pixel is left after the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import nn

from fedskew.core.net import Net, Shape, image_shape
from fedskew.core.settings import UsageError
from fedskew.models.layers import ConvPool, Layers, ReluPool
from fedskew.models.net import Count, Widths, dense, widths


@dataclass(frozen=True)
class MlpOptions:
    """hidden: widths of the hidden layers; "" is logistic regression."""

    hidden: Widths = (200, 200)

    def __post_init__(self) -> None:
        widths(self.hidden)


@dataclass(frozen=True)
class LinearOptions:
    """It has none."""


@dataclass(frozen=True)
class CnnOptions:
    """channels: of the convolutions; hidden: widths of the dense layers; padding: keep the size in convolutions."""

    channels: Widths = (32, 64)
    hidden: Widths = 512
    padding: bool = True

    def __post_init__(self) -> None:
        widths(self.hidden)
        if not widths(self.channels):
            raise ValueError(f"channels={self.channels!r} is invalid: expected one width or more, such as 32-64")


@dataclass(frozen=True)
class SimpleCnnOptions:
    """projection: add MOON's projection (84-84-256) before the head."""

    projection: bool = True


@dataclass(frozen=True)
class Cnn4Options:
    """width: channels of each convolution; track: batch norm has running statistics, else it uses the batch's in
    evaluation, too."""

    width: Count = 64
    track: bool = False


@dataclass(frozen=True)
class ConvNet5Options:
    """hidden: width of the head's hidden layer."""

    hidden: Count = 2048


def mlp(shape: Shape, classes: int, options: MlpOptions, layers: Layers) -> Net:
    """Dense layers with ReLU (McMahan's 2NN)."""
    if not shape or min(shape) < 1:
        raise UsageError(f"mlp is invalid for shape {shape}: expected one or more positive sizes.")
    sizes = (prod(shape), *widths(options.hidden))
    return _net(nn.Sequential(nn.Flatten(), *dense(sizes)), sizes[-1], classes)


def linear(shape: Shape, classes: int, options: LinearOptions, layers: Layers) -> Net:
    """One linear layer: logistic regression on the inputs, or a head on frozen features."""
    return mlp(shape, classes, MlpOptions(hidden=""), layers)


def cnn(shape: Shape, classes: int, options: CnnOptions, layers: Layers) -> Net:
    """5x5 convolutions with 2x2 pools, then dense layers (McMahan's CNN)."""
    padding = 2 if options.padding else 0
    convolutions, flat = _conv_pools("cnn", shape, widths(options.channels), padding, layers)
    sizes = (flat, *widths(options.hidden))
    return _net(nn.Sequential(*convolutions, nn.Flatten(), *dense(sizes)), sizes[-1], classes)


def simple_cnn(shape: Shape, classes: int, options: SimpleCnnOptions, layers: Layers) -> Net:
    """LeNet-like: 5x5 convolutions of 6 and 16 channels, dense layers of 120 and 84 (MOON)."""
    convolutions, flat = _conv_pools("simple-cnn", shape, (6, 16), 0, layers)
    body = nn.Sequential(*convolutions, nn.Flatten(), *dense((flat, 120, 84)))
    if options.projection:
        body.extend(dense((84, 84, 256), last_relu=False))
    return _net(body, 256 if options.projection else 84, classes)


def cnn4(shape: Shape, classes: int, options: Cnn4Options, layers: Layers) -> Net:
    """Four blocks of 3x3 convolution, norm, ReLU, 2x2 pool (FedBABU, with 64 channels)."""
    inputs, height, width = image_shape("cnn4", shape, least=16)
    body = nn.Sequential()
    for _ in range(4):
        body.append(nn.Conv2d(inputs, options.width, 3, padding=1))
        body.append(layers.norm(options.width, track=options.track))
        body.append(ReluPool(layers))
        inputs = options.width
    return _net(body.append(nn.Flatten()), inputs * (height // 16) * (width // 16), classes)


def convnet5(shape: Shape, classes: int, options: ConvNet5Options, layers: Layers) -> Net:
    """Five blocks of 5x5 convolution, norm, ReLU, 2x2 pool; the head has two dense layers (FederatedScope)."""
    inputs, height, width = image_shape("convnet5", shape, least=16)
    pools = 5 if min(height, width) >= 32 else 4
    body = nn.Sequential()
    for i, outputs in enumerate((32, 64, 64, 128, 128)):
        body.append(nn.Conv2d(inputs, outputs, 5, padding=2))
        body.append(layers.norm(outputs))
        body.append(ReluPool(layers) if i < pools else nn.ReLU())
        inputs = outputs
    flat = inputs * (height >> pools) * (width >> pools)
    return Net(body.append(nn.Flatten()), dense((flat, options.hidden, classes), last_relu=False), flat)


def _net(body: nn.Module, features: int, classes: int) -> Net:
    return Net(body, nn.Linear(features, classes), features)


def _conv_pools(
    name: str, shape: Shape, channels: tuple[int, ...], padding: int, layers: Layers
) -> tuple[nn.Sequential, int]:
    """One block of 5x5 convolution, ReLU, 2x2 pool for each of `channels`; and the number of values after the last."""
    least = 1
    for _ in channels:
        least = 2 * least + 4 - 2 * padding
    inputs, height, width = image_shape(name, shape, least)
    stack = nn.Sequential()
    for outputs in channels:
        stack.append(ConvPool(inputs, outputs, padding, layers))
        inputs, height, width = outputs, (height + 2 * padding - 4) // 2, (width + 2 * padding - 4) // 2
    return stack, inputs * height * width
