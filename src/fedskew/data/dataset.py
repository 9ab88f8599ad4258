"""What a data set is: samples, labels, owners; how a test part is held out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedskew.core.settings import UsageError

Array = NDArray[Any]
Arrays = dict[str, Array]  # x_train, y_train, x_test, y_test, u_train, u_test: as files hold them


class Column(msgspec.Struct, frozen=True):
    """A column of a table. `categories`: the names of its categories in order; (): it is a column of numbers."""

    name: str
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class DataSet:
    """A labelled data set in memory (or memory-mapped), with a training and a test part.

    name: what messages and settings call it.
    x_train, x_test: images uint8 [n, h, w, c], or vectors float32 [n, ...]. Of a table float64 [n, columns] as read:
        numbers, positions of categories, NaN where a value is missing; a run prepares them (see data/table.py).
    y_train, y_test: labels int64 [n], from 0 to classes - 1.
    classes: how many classes there are; one of them may have no sample.
    owners_train, owners_test: who made each sample, int64 [n], for the split `natural`; None if unknown.
    mean, std: of x / 255 per channel, by which a net's input is normalised; (): vectors are left as they are, for
        images a run takes those of the training part.
    labels: the names of the classes; () if they have none.
    columns: of a table as read; () for all else, and for a table that is prepared.
    owners: the names of the owners, by their numbers; () if they have none.

    >>> x, y = np.zeros((4, 28, 28, 1), np.uint8), np.array([0, 1, 0, 1])
    >>> data = DataSet("blank", x, y, x[:2], y[:2], classes=2)
    >>> data.shape, len(data.pooled().y_train)
    ((1, 28, 28), 6)
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    owners_train: Array | None = None
    owners_test: Array | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    owners: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a net sees it: (c, h, w), or the vector's shape."""
        one = self.x_train.shape[1:]
        return (one[2], one[0], one[1]) if self.x_train.dtype == np.uint8 else one

    def problem(self) -> str:
        """Why these values cannot be a data set, in words; "" if they can. Values of samples are not looked at."""
        if not isinstance(self.classes, int | np.integer) or self.classes < 1:
            return f"classes={self.classes!r} is invalid: expected the number of classes"
        if self.labels and len(self.labels) != self.classes:
            return f"it has {len(self.labels)} labels, expected {self.classes}, one name per class"
        for part in ("train", "test"):
            if found := self._problem_in_part(part):
                return found
        one, other = (f"{x.dtype}{list(x.shape[1:])}" for x in (self.x_train, self.x_test))
        if one != other:
            return f"its test samples are {other}, expected {one} as for training"
        channels = self.x_train.shape[3] if self.x_train.dtype == np.uint8 else 0
        if (len(self.mean), len(self.std)) not in ((0, 0), (channels, channels)):
            return f"it has {len(self.mean)} means and {len(self.std)} stds, expected {channels}, one per channel"
        return ""

    def _problem_in_part(self, part: str) -> str:
        x, y, owners = (getattr(self, f"{key}_{part}") for key in ("x", "y", "owners"))
        for name, array in ((f"x_{part}", x), (f"y_{part}", y)):
            if not isinstance(array, np.ndarray):
                return f"{name} is a {type(array).__name__}: expected a numpy array; fedskew.from_dataset takes tensors"
        kind = "float64" if self.columns else "uint8" if x.ndim == 4 and x.dtype == np.uint8 else "float32"
        if x.ndim < 2 or x.dtype != kind:
            wanted = "float64 [n, columns]" if self.columns else "images uint8 [n, h, w, c] or vectors float32 [n, ...]"
            return f"x_{part} is {x.dtype}{list(x.shape)}: expected {wanted}"
        if y.dtype != np.int64 or y.shape != (len(x),):
            return f"y_{part} is {y.dtype}{list(y.shape)}: expected int64[{len(x)}], one class per sample of x_{part}"
        if owners is not None and (not isinstance(owners, np.ndarray) or owners.shape != y.shape):
            return f"owners_{part} must have one entry per sample of x_{part}, which are {len(x)}"
        return ""

    def pooled(self) -> DataSet:
        """This data set with its test samples moved to the end of the training part."""
        owners = None
        if self.owners_train is not None:
            if self.owners_test is None:
                raise UsageError(
                    f"{self.name} has owners of its training samples only: expected owners of its test samples, too, "
                    "to pool the two."
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


def number_of(text: str) -> float | None:
    """The finite number that a text stands for; None if it does not stand for one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def holdout_mask(groups: Array, take: Callable[[int], int]) -> Array:
    """Which samples to hold out: `take(n)` random ones of each group of n. The same groups give the same mask.

    groups: the group of each sample, such as its class or its owner.
    """
    # The raw bits of PCG64 are promised not to change between numpy versions; Generator's methods are not.
    key = np.random.PCG64(0).random_raw(len(groups))
    order = np.lexsort((key, groups))
    _, start, count = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(groups)) - np.repeat(start, count)
    mask = np.zeros(len(groups), bool)
    mask[order] = rank < np.repeat([take(int(n)) for n in count], count)
    return mask


def one_in(parts: int) -> Callable[[int], int]:
    """How many of n samples to hold out: n / parts, rounded, at least one, never all n.

    >>> fifth = one_in(5)
    >>> [fifth(n) for n in (1, 2, 7, 8, 100)]
    [0, 1, 1, 2, 20]
    """
    return lambda n: min(max(1, (n + parts // 2) // parts), n - 1)


def split_off_test(arrays: Arrays, mask: Array) -> Arrays:
    """The training arrays in two: the samples that `mask` marks become the test part."""
    train = {key: value[~mask] for key, value in arrays.items() if key.endswith("_train")}
    test = {key.replace("_train", "_test"): value[mask] for key, value in arrays.items() if key.endswith("_train")}
    return train | test


def owner_names(arrays: Arrays) -> tuple[str, ...]:
    """The names of owners given as text, by the numbers of `owner_codes`; () if they are integers or unknown."""
    known = [arrays[key] for key in ("u_train", "u_test") if key in arrays]
    if not known or np.issubdtype(known[0].dtype, np.integer):
        return ()
    return tuple(map(str, np.unique(np.concatenate(known))))


def owner_codes(arrays: Arrays) -> tuple[Array | None, Array | None]:
    """The owners u_train and u_test as int64: integers are kept, text is numbered in sorted order. None if absent."""
    known = [arrays[key] for key in ("u_train", "u_test") if key in arrays]
    if not known:
        return None, None
    owners = np.concatenate(known)
    if not np.issubdtype(owners.dtype, np.integer):
        owners = np.unique(owners, return_inverse=True)[1]
    owners = owners.astype(np.int64)
    return owners[: len(known[0])], owners[len(known[0]) :] if len(known) == 2 else None


def as_images(x: Array) -> Array:
    """Images uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] as contiguous [n, h, w, c]."""
    channels = (1, 3, 4)
    if x.ndim == 3:
        x = x[..., None]
    elif x.shape[1] in channels and x.shape[3] not in channels:
        x = np.moveaxis(x, 1, 3)
    return np.ascontiguousarray(x)


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, of images uint8 [n, h, w, c]; 1 for a constant channel."""
    mean, std = [], []
    for channel in range(x.shape[3]):
        # From the histogram: exact, and no float copy of the images.
        frequency = np.bincount(x[..., channel].ravel(), minlength=256) / x[..., channel].size
        level = np.arange(256) / 255
        mean.append(float(frequency @ level))
        std.append(float(np.sqrt(frequency @ (level - mean[-1]) ** 2)) or 1.0)
    return tuple(mean), tuple(std)
