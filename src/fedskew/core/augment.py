"""Data augmentation: random changes to a batch of images, each image its own, the whole batch at once.

    crop:pad=4,mode=reflect+flip:p=0.5+rotate:degrees=15,mode=bilinear

is a text for `parse_augment`: steps joined by +, each with its settings. Numbers are drawn on the generator's device,
so the same seed gives the same result on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Generator, Tensor
from torch.nn import functional as F

from fedskew.core.settings import UsageError, build, choose, parse

Augment = Callable[[Tensor, Generator], Tensor]  # images [B, h, w, c], uint8 or float32 -> the same shape and type


def crop(x: Tensor, top: Tensor, left: Tensor, pad: int, mode: str = "zero") -> Tensor:
    """Each image padded by `pad` pixels on every side, then cut to its size at its own (top, left), from 0 to 2 pad.

    mode: "zero" pads with zeros, "reflect" with the image mirrored at its edge.
    """
    b, h, w, c = x.shape
    padded = _reflected(x, pad) if mode == "reflect" else F.pad(x, (0, 0, pad, pad, pad, pad))
    tall, wide = h + 2 * pad, w + 2 * pad
    image = torch.arange(b, device=x.device)[:, None]
    row = top[:, None] + torch.arange(h, device=x.device)
    start = ((image * tall + row) * wide + left[:, None]) * c  # where each row of each crop begins
    # Every run of w * c numbers, as a view: rows are copied whole, several times faster than pixel by pixel.
    runs = padded.reshape(-1).unfold(0, w * c, 1)
    return runs.index_select(0, start.view(-1)).view(b, h, w, c)


def _reflected(x: Tensor, pad: int) -> Tensor:
    for dim in (1, 2):
        size = x.shape[dim]
        if pad >= size:
            raise UsageError(
                f"crop: pad={pad} is invalid: expected less than the {size} pixels of the image with mode=reflect; "
                "mode=zero takes any."
            )
        place = torch.arange(-pad, size + pad, device=x.device).abs()
        x = x.index_select(dim, size - 1 - (size - 1 - place).abs())
    return x


def flip(x: Tensor, which: Tensor) -> Tensor:
    """The images where `which` is true, mirrored left to right; the others as they are."""
    b = x.shape[0]
    return torch.cat([x, x.flip(2)]).index_select(0, torch.arange(b, device=x.device) + b * which)


def rotate(x: Tensor, radians: Tensor, mode: str = "nearest") -> Tensor:
    """Each image turned counter-clockwise about its centre by its own angle; what comes in from outside is zero.

    mode: "nearest" or "bilinear" interpolation.
    """
    h, w = x.shape[1:3]
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # Where each output pixel comes from; the grid runs over -1..1 on both axes, hence the aspect ratio.
    theta = torch.stack([cos, -sin * h / w, zero, sin * w / h, cos, zero], dim=1).view(-1, 2, 3)
    planes = x.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(theta, list(planes.shape), align_corners=False)
    turned = F.grid_sample(planes, grid, mode=mode, padding_mode="zeros", align_corners=False).permute(0, 2, 3, 1)
    return (turned if x.is_floating_point() else turned.round()).to(x.dtype).contiguous()


@dataclass(frozen=True)
class Crop:
    """Shift each image by up to `pad` pixels in both directions, uniformly. `mode`: "zero" or "reflect" padding."""

    pad: Annotated[int, Meta(ge=0)] = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        top, left = torch.randint(0, 2 * self.pad + 1, (2, len(x)), generator=rng, device=rng.device).to(x.device)
        return crop(x, top, left, self.pad, self.mode)


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability p."""

    p: Annotated[float, Meta(ge=0, le=1)] = 0.5

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        return flip(x, (torch.rand(len(x), generator=rng, device=rng.device) < self.p).to(x.device))


@dataclass(frozen=True)
class Rotate:
    """Turn each image by an angle uniform in +-degrees. `mode`: "nearest" (as torchvision's default) or "bilinear"."""

    degrees: Annotated[float, Meta(ge=0, le=180)] = 15.0
    mode: Literal["nearest", "bilinear"] = "nearest"

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        turn = torch.rand(len(x), generator=rng, device=rng.device).to(x.device) * 2 - 1
        return rotate(x, turn * math.radians(self.degrees), self.mode)


STEPS: dict[str, type[Crop] | type[Flip] | type[Rotate]] = {"crop": Crop, "flip": Flip, "rotate": Rotate}


@dataclass(frozen=True)
class Steps:
    """Several augmentations in sequence. Can be pickled for worker processes."""

    steps: tuple[Augment, ...]

    def __call__(self, x: Tensor, rng: Generator) -> Tensor:
        if x.dim() != 4:
            raise UsageError(
                f"augment is invalid for samples of shape {tuple(x.shape[1:])}: expected images (h, w, c)."
            )
        for step in self.steps:
            x = step(x, rng)
        return x


def parse_augment(text: str) -> Augment | None:
    """The function of (batch, generator) that a text stands for; None for "" and "none".

    >>> augment = parse_augment("flip:p=1")
    >>> augment(torch.tensor([[[[1], [2], [3]]]]), Generator()).flatten().tolist()
    [3, 2, 1]
    >>> parse_augment("none") is None
    True
    """
    if text.strip() in ("", "none"):
        return None
    return Steps(
        tuple(build(choose("augment", name, STEPS), options, name) for name, options in parse(text, "augment"))
    )
