"""The samples of one site, and how they become the batches a net sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Data:
    """Samples of one site: an index into arrays that all sites share, never a copy of them.

    Images are uint8 [n, h, w, c] and become normalised float32 [b, c, h, w] batch by batch, in
    channels-last memory; anything else is float and passes as it is.
    """

    x: Tensor
    y: Tensor  # int64 labels of all of x
    index: Tensor  # int64, this site's samples
    mean: tuple[float, ...] = ()  # per channel, of x / 255
    std: tuple[float, ...] = ()
    noise: float = 0.0  # standard deviation of this client's input noise (feature skew)
    rotation: float = 0.0  # this client's turn in degrees (feature skew)
    seed: int = 0  # of this client's noise

    def __len__(self) -> int:
        return self.index.shape[0]  # a third of the time of len(tensor), which is written in Python

    @property
    def labels(self) -> Tensor:
        return self.y[self.index]

    def part(self, positions: Tensor) -> Data:
        """The samples at these positions of the index."""
        return replace(self, index=self.index[positions])

    def take(self, positions: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Inputs as a net sees them, and labels."""
        chosen = self.index[positions]
        x = self.x.index_select(0, chosen)
        if augment is not None:
            x = augment(x)
        if x.dtype == torch.uint8:
            mean, std = _scaled(self.mean, self.std)
            x = x.float().sub_(mean).div_(std).permute(0, 3, 1, 2)
        if self.rotation or self.noise:
            x = self._skewed(x, chosen)
        return x, self.y.index_select(0, chosen)

    def _skewed(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Feature skew: a pure function of client and sample, so a sample looks the same whenever it is drawn."""
        if self.rotation:
            x = rotated(x, self.rotation)
        if self.noise:
            own = torch.Generator()
            draws = [torch.randn(x.shape[1:], generator=own.manual_seed(self.seed + int(i))) for i in chosen]
            x = x + self.noise * torch.stack(draws)
        return x


@lru_cache(maxsize=16)
def _scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of x instead of x / 255."""
    return torch.tensor(mean) * 255, torch.tensor(std) * 255


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images [b, c, h, w] turned about their centre; quarter turns are exact."""
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90) % 4, (2, 3))
    turn = torch.tensor(degrees).deg2rad()
    matrix = torch.stack(
        [torch.stack([turn.cos(), -turn.sin(), turn * 0]), torch.stack([turn.sin(), turn.cos(), turn * 0])]
    )
    grid = nn.functional.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def take_together(parts: Sequence[Data]) -> tuple[Tensor, Tensor]:
    """All samples of several sites, one after the other: inputs as a net sees them, and labels."""
    if any(part.rotation or part.noise or part.x is not parts[0].x for part in parts):
        taken = [part.take(torch.arange(len(part))) for part in parts]
        return torch.cat([x for x, _ in taken]), torch.cat([y for _, y in taken])
    index = torch.cat([part.index for part in parts])
    return replace(parts[0], index=index).take(torch.arange(len(index)))


def to_device(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device. To a CUDA GPU it is copied from pinned memory, while the CPU prepares what comes next."""
    if device.startswith("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def pieces(n: int, size: int) -> Iterator[Tensor]:
    """The positions 0..n-1, `size` at a time."""
    return (torch.arange(start, min(start + size, n)) for start in range(0, n, size))
