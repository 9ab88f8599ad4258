"""What a data set is: samples, labels, natural owners; and how a test part is held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.core.settings import UsageError

Array = NDArray[Any]
Arrays = dict[str, Array]  # x_train, y_train, x_test, y_test, u_train, u_test: as files hold them


@dataclass(frozen=True, eq=False)
class DataSet:
    name: str
    x_train: Array  # images: uint8 [n, h, w, c]; vectors: float32 [n, ...]
    y_train: Array  # int64 [n], 0..classes-1
    x_test: Array
    y_test: Array
    classes: int
    owners_train: Array | None = None  # int64 [n], the natural owner (writer) of each sample
    owners_test: Array | None = None
    mean: tuple[float, ...] = ()  # per channel of x / 255; () = no normalisation
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()  # class names, if known

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample as a net sees it: (c, h, w), or the vector's shape."""
        one = self.x_train.shape[1:]
        return (one[2], one[0], one[1]) if self.x_train.dtype == np.uint8 else one

    def pooled(self) -> DataSet:
        """Train and test merged into the training pool, the test part empty."""
        owners = None
        if self.owners_train is not None:
            if self.owners_test is None:
                raise UsageError(
                    f"{self.name} names the owners of its training samples only: train and test cannot pool."
                )
            owners = np.concatenate([self.owners_train, self.owners_test])
        return replace(
            self,
            x_train=np.concatenate([self.x_train, self.x_test]),
            y_train=np.concatenate([self.y_train, self.y_test]),
            x_test=self.x_test[:0],
            y_test=self.y_test[:0],
            owners_train=owners,
            owners_test=None if owners is None else owners[:0],
        )


def held_out(groups: Array, take: Callable[[int], int]) -> Array:
    """A fixed mask: of each group of n samples, `take(n)` drawn at random."""
    # The raw bits of PCG64 are promised not to change between numpy versions; Generator's methods are not.
    key = np.random.PCG64(0).random_raw(len(groups))
    order = np.lexsort((key, groups))
    _, start, count = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(groups)) - np.repeat(start, count)
    mask = np.zeros(len(groups), bool)
    mask[order] = rank < np.repeat([take(int(n)) for n in count], count)
    return mask


def share(part: int) -> Callable[[int], int]:
    """One in `part`, rounded, at least one, and never the whole group."""
    return lambda n: min(max(1, (n + part // 2) // part), n - 1)


def divide(arrays: Arrays, mask: Array) -> Arrays:
    """The training arrays cut in two: what `mask` marks is the test part."""
    train = {key: value[~mask] for key, value in arrays.items() if key.endswith("_train")}
    test = {key.replace("_train", "_test"): value[mask] for key, value in arrays.items() if key.endswith("_train")}
    return train | test


def owner_codes(arrays: Arrays) -> tuple[Array | None, Array | None]:
    """u_train and u_test as int64: numbers are kept, text is numbered in sorted order."""
    known = [arrays[key] for key in ("u_train", "u_test") if key in arrays]
    if not known:
        return None, None
    owners = np.concatenate(known)
    if not np.issubdtype(owners.dtype, np.integer):
        owners = np.unique(owners, return_inverse=True)[1]
    owners = owners.astype(np.int64)
    return owners[: len(known[0])], owners[len(known[0]) :] if len(known) == 2 else None


def as_images(x: Array) -> Array:
    """uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] -> [n, h, w, c], contiguous."""
    channels = (1, 3, 4)
    if x.ndim == 3:
        x = x[..., None]
    elif x.shape[1] in channels and x.shape[3] not in channels:
        x = np.moveaxis(x, 1, 3)
    return np.ascontiguousarray(x)


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, of images uint8 [n, h, w, c]."""
    mean, std = [], []
    for channel in range(x.shape[3]):
        # From the histogram: exact, and no float copy of the images.
        share_of = np.bincount(x[..., channel].ravel(), minlength=256) / x[..., channel].size
        level = np.arange(256) / 255
        mean.append(float(share_of @ level))
        std.append(float(np.sqrt(share_of @ (level - mean[-1]) ** 2)) or 1.0)  # a constant channel divides by 1
    return tuple(mean), tuple(std)
