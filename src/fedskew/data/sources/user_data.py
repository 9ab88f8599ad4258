"""The user's own data: a folder of images, an .npz, a table, or any torch Dataset.

Options follow the path, after "?": `images/?size=32`, `patients.csv?label=diagnosis&owner=hospital`.
"""

from __future__ import annotations

import contextlib
import operator
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import torch

from fedskew.core.settings import UsageError, build
from fedskew.data.dataset import (
    Array,
    Arrays,
    Column,
    DataSet,
    as_images,
    holdout_mask,
    moments,
    one_in,
    owner_codes,
    owner_names,
    split_off_test,
)
from fedskew.data.sources.csv import Columns, read_table
from fedskew.data.sources.formats import check_arrays, read_npz, reading

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
TABLES = (".csv", ".tsv")
TEST_FOLDERS = ("test", "val")


@dataclass(frozen=True)
class ImageFolder:
    """Options of a folder of images. `size`: resize every image to size x size; None leaves them as they are."""

    size: Annotated[int, msgspec.Meta(ge=1)] | None = None


@dataclass(frozen=True)
class NoOptions:
    """An .npz has no options."""


def is_path(text: str) -> bool:
    """Whether `text` is a path rather than the name of a data set."""
    path, _ = path_and_options(text)
    return any(mark in text for mark in (os.sep, "/")) or path.suffix in (".npz", *TABLES) or path.exists()


def path_and_options(text: str) -> tuple[Path, dict[str, str]]:
    """`images/?size=32` as (images/, {"size": "32"}). A plus is a plus: columns may be called HER2+."""
    path, _, query = text.partition("?")
    return Path(path).expanduser(), dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))


def load_path(text: str) -> DataSet:
    """The data set at a path, which is a folder of images, an .npz or a .csv; options follow after "?"."""
    path, options = path_and_options(text)
    if path.is_dir():
        return _load_images(path, build(ImageFolder, options, str(path)))
    if not path.exists():
        raise UsageError(f"{path} does not exist: expected a folder of images, an .npz or a .csv file.")
    if path.suffix == ".npz":
        build(NoOptions, options, str(path))
        return from_arrays(path.stem, path, read_npz(path, strict=True))
    if path.suffix in TABLES:
        arrays, columns = read_table(path, build(Columns, options, str(path)))
        return from_arrays(path.stem, path, arrays, columns)
    raise UsageError(f"{path} is invalid as data: expected a folder of images, an .npz or a .csv file.")


def from_arrays(name: str, where: Path | str, arrays: Arrays, columns: tuple[Column, ...] = ()) -> DataSet:
    """A data set from arrays x_train, y_train and, optionally, x_test, y_test, u_train, u_test.

    where: the file or data set that error messages name.
    columns: of a table.
    Labels and owners may be integers or text. Without a test part, a fifth of each class becomes one.
    """
    with reading(where):
        check_arrays(arrays, list(arrays))
        if not columns:
            arrays = arrays | {key: _samples(key, arrays[key]) for key in ("x_train", "x_test") if key in arrays}
        if "x_test" not in arrays:
            arrays = split_off_test(arrays, holdout_mask(arrays["y_train"], one_in(5)))
        x_train, x_test = arrays["x_train"], arrays["x_test"]
        if (x_train.shape[1:], x_train.dtype) != (x_test.shape[1:], x_test.dtype):
            kinds = [f"{x.dtype} {x.shape[1:]}" for x in (x_train, x_test)]
            raise ValueError(f"its test samples are {kinds[1]}, expected {kinds[0]} as for training")
        names, (y_train, y_test) = _encode_labels(arrays["y_train"], arrays["y_test"])
        if len(names) < 2:
            raise ValueError(f"all training samples are of one class, {names[0]}, expected two or more")
    labels = () if names == list(range(len(names))) else tuple(map(str, names))
    mean, std = moments(x_train) if x_train.dtype == np.uint8 else ((), ())
    owners = owner_codes(arrays)
    data = DataSet(name, x_train, y_train, x_test, y_test, len(names), *owners, mean, std, labels, columns)
    return replace(data, owners=owner_names(arrays))


def _samples(key: str, x: Array) -> Array:
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return as_images(x)
    if x.dtype.kind in "iu" and x.dtype.itemsize > 1 and x.ndim in (3, 4):
        raise ValueError(f"{key} is {x.dtype}, expected images as uint8 (0 to 255), or numbers as float32")
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"{key} has values that are missing or infinite, expected finite numbers")
    return x


def _encode_labels(train: Array, test: Array) -> tuple[list[Any], list[Array]]:
    """The classes in order (by value if all are numbers, also as text), and the labels as positions in that order."""
    names = sorted(set(train.tolist()))
    with contextlib.suppress(ValueError):  # words stay in alphabetical order
        names.sort(key=float)
    place = {name: i for i, name in enumerate(names)}
    for label in test.tolist():
        if label not in place:
            raise ValueError(f"class {label!r} is in the test part only, expected it in the training part, too")
    return names, [np.array([place[label] for label in y.tolist()], np.int64) for y in (train, test)]


def _load_images(folder: Path, options: ImageFolder) -> DataSet:
    """folder/<class>/*.png, or folder/train/<class> with folder/test/<class> (or val)."""
    parts = {"train": folder}
    if _folders(folder / "train"):
        test = [folder / name for name in TEST_FOLDERS if (folder / name).is_dir()]
        parts = dict(zip(("train", "test"), [folder / "train", *test], strict=False))
    files = {part: _images_and_labels(place) for part, place in parts.items()}
    mode = _common_mode([path for part in files.values() for path, _ in part], options.size, folder)
    arrays: Arrays = {}
    for part, pairs in files.items():
        arrays[f"x_{part}"] = np.stack([pixels_of(path, mode, options.size) for path, _ in pairs])
        arrays[f"y_{part}"] = np.array([label for _, label in pairs])
    return from_arrays(folder.resolve().name, folder, arrays)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []


def _images_and_labels(folder: Path) -> list[tuple[Path, str]]:
    pairs = []
    for place in _folders(folder):
        images = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not images:
            raise UsageError(f"{place} has no images: expected {', '.join(SUFFIXES)}.")
        pairs += [(path, place.name) for path in images]
    if not pairs:
        raise UsageError(f"{folder} has no folders of images: expected one folder per class.")
    return pairs


def _common_mode(paths: list[Path], size: int | None, folder: Path) -> str:
    """The PIL mode for all images: L if all are grey, else RGB. Raises if their sizes differ and `size` is None."""
    from PIL import Image  # here, because only images need it

    sizes, modes = set(), set()
    for path in paths:
        with reading(path), Image.open(path) as image:
            _check_depth(image)
            sizes.add(image.size)
            modes.add(image.mode)
    if len(sizes) > 1 and size is None:
        some = ", ".join(f"{w}x{h}" for w, h in sorted(sizes)[:4]) + (", ..." if len(sizes) > 4 else "")
        side = min(min(pair) for pair in sizes)
        raise UsageError(
            f"{folder} has images of {len(sizes)} sizes ({some}): expected one; {folder}?size={side} resizes."
        )
    return "L" if modes <= {"L", "1"} else "RGB"


def _check_depth(image: Image.Image) -> None:
    """Raise ValueError for pixels of more than 8 bits: they would be cut off at 255."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels are of mode {image.mode}, expected 8 bits per channel")


def pixels_of(path: Path, mode: str, size: int | None) -> Array:
    """The pixels of an image in a PIL mode, resized to size x size; None leaves its size."""
    from PIL import Image  # here, because only images need it

    with reading(path), Image.open(path) as stored:
        _check_depth(stored)
        image = stored.convert(mode)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


def from_dataset(train: Any, test: Any = None, *, name: str = "own") -> DataSet:
    """A data set from any map-style torch Dataset (`len` and `[i]`) of pairs (x, y).

    train, test: x is a tensor (images: channels first), an array (images uint8: channels last) or a PIL image; y is an
        integer or text. Floats that are whole 255ths, as `ToTensor` makes them, become bytes again.
        If test is None, a fifth of each class becomes the test part.
    name: what messages and settings call it.

    >>> data = from_dataset([(torch.tensor([float(i), 1.0]), i % 2) for i in range(10)], name="pairs")
    >>> data.name, data.shape, data.classes, len(data.y_test)
    ('pairs', (2,), 2, 2)
    """
    arrays = _items(train, "train") | ({} if test is None else _items(test, "test"))
    floats = [key for key in arrays if key[0] == "x" and arrays[key].dtype != np.uint8]
    if floats and all(_are_bytes(arrays[key]) for key in floats):
        arrays |= {key: np.moveaxis(np.round(arrays[key] * 255).astype(np.uint8), 1, 3) for key in floats}
    return from_arrays(name, name, arrays)


def _items(dataset: Any, part: str) -> Arrays:
    xs: list[Array] = []
    ys: list[int | str] = []
    with reading(f"the {part} dataset"):
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise ValueError("it has no length or no samples, expected a map-style data set of pairs (x, y)")
        for i in range(len(dataset)):  # by index: a map-style Dataset need not be iterable
            x, y = _pair(dataset[i], i)
            xs.append(_item(x))
            ys.append(y if isinstance(y, str) else _class(y, i))
        return {f"x_{part}": np.stack(xs), f"y_{part}": np.array(ys)}


def _pair(sample: Any, i: int) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        what = f"{len(sample)} values" if isinstance(sample, tuple | list) else f"a {type(sample).__name__}"
        raise ValueError(f"sample {i} is {what}, expected a pair (x, y)")
    return sample[0], sample[1]


def _class(y: Any, i: int) -> int:
    try:
        return operator.index(y)
    except TypeError:
        raise ValueError(f"the class of sample {i} is a {type(y).__name__}, expected an integer or text") from None


def _item(x: Any) -> Array:
    from PIL import Image  # here, because only images need it

    if isinstance(x, Image.Image):
        return np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    if isinstance(x, torch.Tensor):
        array: Array = x.detach().cpu().numpy()
        return np.moveaxis(array, 0, 2) if array.dtype == np.uint8 and array.ndim == 3 else array
    return np.asarray(x)


def _are_bytes(x: Array) -> bool:
    """Whether floats [n, c, h, w] are all exactly k / 255, as `ToTensor` makes them."""
    if x.ndim != 4 or x.shape[1] not in (1, 3, 4) or x.dtype.kind != "f" or x.min() < 0 or x.max() > 1:
        return False
    return bool(np.array_equal(np.round(x * 255) / x.dtype.type(255), x))
