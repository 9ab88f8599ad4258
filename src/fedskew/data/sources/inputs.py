"""New samples for a trained model: a folder of images, rows of a table, an .npz, or the test part of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.core.settings import UsageError, build
from fedskew.data.dataset import Array, DataSet, as_images
from fedskew.data.sources.csv import Columns, read_rows
from fedskew.data.sources.formats import reading
from fedskew.data.sources.loading import SOURCES, load
from fedskew.data.sources.user_data import SUFFIXES, TABLES, ImageFolder, NoOptions, path_and_options, pixels_of
from fedskew.data.table import Preparation

SAMPLES, CLASSES = ("x", "x_test", "x_train"), {"x": "y", "x_test": "y_test", "x_train": "y_train"}


@dataclass(frozen=True)
class Inputs:
    """Raw samples.

    x: images uint8 [n, h, w, c], vectors float32 [n, ...], or rows as `TableInput` takes them.
    names: what output calls each sample: its file, or its number from 1.
    labels: the classes as they are written, where they are known; None if not.
    folders: the labels are names of folders, which need not be classes.
    """

    x: Array
    names: list[str]
    labels: list[str] | None = None
    folders: bool = False


def read_inputs(text: str, shape: tuple[int, ...], table: Preparation | None, folder: Path | None = None) -> Inputs:
    """The samples at a path (options follow after "?"), or those of the test part of a named data set.

    A table may be named as it was for training: of its options only `label` counts, the column of the classes where
    they are known. The model says which other columns it takes.

    shape: of an input, for images (channels, height, width). table: of a model that takes rows of a table.
    folder: where named data sets are; None: the default folder.
    """
    path, options = path_and_options(text)
    if text in SOURCES:
        return _test_part(load(text, folder), table)
    if not path.exists():
        raise UsageError(f"{path} does not exist: expected a folder of images, an .npz or a .csv file.")
    if path.is_dir():
        return _images(path, shape, build(ImageFolder, options, str(path)))
    if path.suffix == ".npz":
        build(NoOptions, options, str(path))
        return _arrays(path)
    if path.suffix in TABLES:
        if table is None:
            raise UsageError(f"{path} is a table, but the model was not trained on one.")
        x, labels = read_rows(path, table.columns, build(Columns, options, str(path)).label)
        return Inputs(x, _numbered(x), labels)
    raise UsageError(f"{path} is invalid as data: expected a folder of images, an .npz or a .csv file.")


def _numbered(x: Array) -> list[str]:
    return [str(i + 1) for i in range(len(x))]


def _test_part(data: DataSet, table: Preparation | None) -> Inputs:
    x = data.x_test
    if data.columns and table is not None:
        x = table.matrix(x, data.columns)
    labels = [data.labels[y] if data.labels else str(y) for y in data.y_test]
    return Inputs(x, _numbered(x), labels)


def _images(folder: Path, shape: tuple[int, ...], options: ImageFolder) -> Inputs:
    """All images in a folder, at any depth. If each is in a folder, the outermost one is its class."""
    if len(shape) != 3:
        raise UsageError(f"{folder} is a folder of images, but the model was not trained on images.")
    channels, height, width = shape
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != "." and p.is_file())
    if not files:
        raise UsageError(f"{folder} has no images: expected {', '.join(SUFFIXES)}.")
    x = []
    for path in files:
        pixels = pixels_of(path, "L" if channels == 1 else "RGB", options.size)
        if pixels.shape[:2] != (height, width):
            cure = f"; {folder}?size={width} resizes" if height == width else ""
            raise UsageError(
                f"{path} has {pixels.shape[1]}x{pixels.shape[0]} pixels: the model takes {width}x{height}{cure}."
            )
        x.append(pixels)
    inside = [path.relative_to(folder) for path in files]
    labels = [p.parts[0] for p in inside] if all(len(p.parts) > 1 for p in inside) else None
    return Inputs(as_images(np.stack(x)), [str(p) for p in inside], labels, folders=labels is not None)


def _arrays(path: Path) -> Inputs:
    """x (or x_test, x_train) of an .npz, with y (y_test, y_train) where it is there."""
    with reading(path), np.load(path, allow_pickle=False) as stored:
        key = next((key for key in SAMPLES if key in stored), None)
        if key is None:
            raise ValueError(f"it has {', '.join(stored) or 'no arrays'}, expected x, and y if the classes are known")
        x = stored[key]
        labels = [str(y) for y in stored[CLASSES[key]].tolist()] if CLASSES[key] in stored else None
        if not x.ndim:
            raise ValueError(f"{key} is a single value, expected one row per sample")
        if labels is not None and len(labels) != len(x):
            raise ValueError(f"it has {len(x)} samples and {len(labels)} classes, expected one class per sample")
    return Inputs(x, _numbered(x), labels)
