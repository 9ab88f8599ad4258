"""A user's own data: a folder of images, an .npz, a table, or any torch Dataset.

Options follow the path: `images/?size=32`, `patients.csv?label=diagnosis&owner=hospital`.
"""

from __future__ import annotations

import contextlib
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import torch
from PIL import Image

from fedskew.core.settings import UsageError, build
from fedskew.data.dataset import Array, Arrays, DataSet, as_images, divide, held_out, moments, owner_codes, share
from fedskew.data.sources.csv import Columns, read_table
from fedskew.data.sources.formats import check, read_npz, reading

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
TABLES = (".csv", ".tsv")
TEST_FOLDERS = ("test", "val")


@dataclass(frozen=True)
class ImageFolder:
    size: Annotated[int, msgspec.Meta(ge=1)] | None = None  # every image is resized to size x size


@dataclass(frozen=True)
class NoOptions:
    pass


def is_path(text: str) -> bool:
    """Whether `text` points to files rather than naming a set."""
    path, _ = _parts(text)
    return any(mark in text for mark in (os.sep, "/")) or path.suffix in (".npz", *TABLES) or path.exists()


def _parts(text: str) -> tuple[Path, dict[str, str]]:
    path, _, query = text.partition("?")
    return Path(path).expanduser(), dict(parse_qsl(query, keep_blank_values=True))


def load_own(text: str) -> DataSet:
    """The data set at a path, by what is there: a folder of images, an .npz or a .csv."""
    path, options = _parts(text)
    if path.is_dir():
        return _load_images(path, build(ImageFolder, options, str(path)))
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}.")
    if path.suffix == ".npz":
        build(NoOptions, options, str(path))
        return assemble(path.stem, path, read_npz(path))
    if path.suffix in TABLES:
        return assemble(path.stem, path, read_table(path, build(Columns, options, str(path))))
    raise UsageError(f"{path} is neither a folder of images, an .npz nor a .csv file.")


def assemble(name: str, where: Path | str, arrays: Arrays) -> DataSet:
    """Arrays with any labels and owners as a data set; a fifth of each class is held out if there is no test part."""
    with reading(where):
        check(arrays, list(arrays))
        arrays = arrays | {key: _samples(key, arrays[key]) for key in ("x_train", "x_test") if key in arrays}
        if "x_test" not in arrays:
            arrays = divide(arrays, held_out(arrays["y_train"], share(5)))
        x_train, x_test = arrays["x_train"], arrays["x_test"]
        if (x_train.shape[1:], x_train.dtype) != (x_test.shape[1:], x_test.dtype):
            kinds = [f"{x.dtype} {x.shape[1:]}" for x in (x_train, x_test)]
            raise ValueError(f"samples are {kinds[0]} for training but {kinds[1]} for testing")
        names, (y_train, y_test) = _coded(arrays["y_train"], arrays["y_test"])
        if len(names) < 2:
            raise ValueError(f"all training samples are of one class, {names[0]}")
    labels = () if names == list(range(len(names))) else tuple(map(str, names))
    mean, std = moments(x_train) if x_train.dtype == np.uint8 else ((), ())
    return DataSet(name, x_train, y_train, x_test, y_test, len(names), *owner_codes(arrays), mean, std, labels)


def _samples(key: str, x: Array) -> Array:
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return as_images(x)
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"{key} has values that are missing or infinite")
    return x


def _coded(train: Array, test: Array) -> tuple[list[Any], list[Array]]:
    """The classes in order (numbers by value, also when they are text), and the labels as their places in it."""
    names = sorted(set(train.tolist()))
    with contextlib.suppress(ValueError):  # words stay in the order of the alphabet
        names.sort(key=float)
    place = {name: i for i, name in enumerate(names)}
    for label in test.tolist():
        if label not in place:
            raise ValueError(f"class {label!r} is in the test part only")
    return names, [np.array([place[label] for label in y.tolist()], np.int64) for y in (train, test)]


def _load_images(folder: Path, options: ImageFolder) -> DataSet:
    """folder/<class>/*.png, or folder/train/<class> with folder/test/<class> (or val)."""
    parts = {"train": folder}
    if _folders(folder / "train"):
        test = [folder / name for name in TEST_FOLDERS if (folder / name).is_dir()]
        parts = dict(zip(("train", "test"), [folder / "train", *test], strict=False))
    files = {part: _labelled(place) for part, place in parts.items()}
    mode = _common_mode([path for part in files.values() for path, _ in part], options.size, folder)
    arrays: Arrays = {}
    for part, pairs in files.items():
        arrays[f"x_{part}"] = np.stack([_pixels(path, mode, options.size) for path, _ in pairs])
        arrays[f"y_{part}"] = np.array([label for _, label in pairs])
    return assemble(folder.resolve().name, folder, arrays)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []


def _labelled(folder: Path) -> list[tuple[Path, str]]:
    pairs = []
    for place in _folders(folder):
        images = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not images:
            raise UsageError(f"{place} holds no images; expected {', '.join(SUFFIXES)}.")
        pairs += [(path, place.name) for path in images]
    if not pairs:
        raise UsageError(f"{folder} holds no folders of images; expected one folder per class.")
    return pairs


def _common_mode(paths: list[Path], size: int | None, folder: Path) -> str:
    """Grey if every image is, else colour; all of one size, unless they are resized. Reads headers only."""
    sizes, modes = set(), set()
    for path in paths:
        with reading(path), Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels are of mode {image.mode}; 8 bits per channel are needed")
            sizes.add(image.size)
            modes.add(image.mode)
    if len(sizes) > 1 and size is None:
        some = ", ".join(f"{w}x{h}" for w, h in sorted(sizes)[:4]) + (", ..." if len(sizes) > 4 else "")
        side = min(min(pair) for pair in sizes)
        raise UsageError(f"{folder} has images of {len(sizes)} sizes ({some}); {folder}?size={side} would resize them.")
    return "L" if modes <= {"L", "1"} else "RGB"


def _pixels(path: Path, mode: str, size: int | None) -> Array:
    with reading(path), Image.open(path) as stored:
        image = stored.convert(mode)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


def from_dataset(train: Any, test: Any = None, *, name: str = "own") -> DataSet:
    """Any map-style torch Dataset of (x, y): tensors (channels first), arrays (channels last) or PIL images."""
    arrays = _items(train, "train") | ({} if test is None else _items(test, "test"))
    floats = [key for key in arrays if key[0] == "x" and arrays[key].dtype != np.uint8]
    if floats and all(_is_bytes(arrays[key]) for key in floats):
        arrays |= {key: np.moveaxis(np.round(arrays[key] * 255).astype(np.uint8), 1, 3) for key in floats}
    return assemble(name, name, arrays)


def _items(dataset: Any, part: str) -> Arrays:
    xs: list[Array] = []
    ys: list[int | str] = []
    with reading(f"the {part} dataset"):
        for i in range(len(dataset)):  # by index: a map-style Dataset need not be iterable
            x, y = dataset[i]
            xs.append(_item(x))
            ys.append(y if isinstance(y, str) else operator.index(y))  # a float is no class
        return {f"x_{part}": np.stack(xs), f"y_{part}": np.array(ys)}


def _item(x: Any) -> Array:
    if isinstance(x, Image.Image):
        return np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    if isinstance(x, torch.Tensor):
        array: Array = x.detach().cpu().numpy()
        return np.moveaxis(array, 0, 2) if array.dtype == np.uint8 and array.ndim == 3 else array
    return np.asarray(x)


def _is_bytes(x: Array) -> bool:
    """Whether floats [n, c, h, w] are k / 255 to the last bit, as `ToTensor` makes them."""
    if x.ndim != 4 or x.shape[1] not in (1, 3, 4) or x.dtype.kind != "f" or x.min() < 0 or x.max() > 1:
        return False
    return bool(np.array_equal(np.round(x * 255) / x.dtype.type(255), x))
