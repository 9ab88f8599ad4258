"""Data sets by name or path: found or fetched, and checked against what was published."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedskew.core.settings import UsageError, choose
from fedskew.data.dataset import Array, Arrays, DataSet, as_images, moments, owner_codes
from fedskew.data.sources import hub
from fedskew.data.sources.catalogue import SOURCES, Found, Source
from fedskew.data.sources.formats import read_npz, reading, write_npz
from fedskew.data.sources.user_data import from_dataset, is_path, load_path

__all__ = ["SOURCES", "DataSet", "default_folder", "from_dataset", "listing", "load", "load_data"]


def default_folder() -> Path:
    """Where named data sets are kept: the folder in FEDSKEW_DATA, else `fedskew` in the user's cache folder."""
    if given := os.environ.get("FEDSKEW_DATA"):
        return Path(given).expanduser()
    caches = {"win32": ("LOCALAPPDATA", "~/AppData/Local"), "darwin": ("", "~/Library/Caches")}
    variable, usual = caches.get(sys.platform, ("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get(variable) or usual).expanduser() / "fedskew"


def load(name: str, folder: Path | None = None) -> DataSet:
    """Load a data set.

    name: a named set ("digits", "mnist", ...; `listing` has them all), or the path of a folder of images, an .npz or a
        .csv, with options as in "patients.csv?label=diagnosis".
    folder: where named sets are kept; None: `default_folder()`. A set that is missing there is fetched from the
        Hugging Face hub and kept, if `fedskew[hub]` is installed.

    >>> data = load("digits")
    >>> data.x_train.shape, data.classes
    ((1437, 8, 8, 1), 10)
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"data {name!r} is invalid: expected the name of a data set, or a path, as text.")
    if name not in SOURCES and is_path(name):
        return load_path(name)
    source = choose("data set", name, SOURCES)
    if source.table:
        return _shipped(name, source)
    folder = folder or default_folder()
    found = _find(name, source, folder)
    if found is None:
        if name not in hub.HUB or not hub.available():
            raise UsageError(_how_to_get(name, source, folder))
        found = folder / f"{name}.npz", hub.fetch(name, cast(tuple[int, int, int], source.size))
        data = _data_set(name, source, *found)  # checked before it is written
        write_npz(*found)
        return data
    return _data_set(name, source, *found)


load_data = load  # its name in `import fedskew`, where `load` loads the model of a run


def listing(folder: Path | None = None) -> list[dict[str, Any]]:
    """One row per named set: whether it is present, where, its counts, and "ok" or what is wrong. Fetches nothing."""
    folder = folder or default_folder()
    return [_row(name, source, folder) for name, source in SOURCES.items()]


def _shipped(name: str, source: Source) -> DataSet:
    """A table that is part of the package."""
    data = load_path(f"{Path(__file__).with_name(name)}.csv?{source.table}")
    return replace(data, name=name, labels=source.labels)


def _row(name: str, source: Source, folder: Path) -> dict[str, Any]:
    shape = (source.size[-1], *source.size[:-1])
    row: dict[str, Any] = {"name": name, "present": True, "where": str(folder), "train": sum(source.train)}
    row |= {"test": sum(source.test), "shape": shape, "classes": len(source.labels), "owners": 0, "verified": "ok"}
    try:
        if source.table:
            row["where"], data = "fedskew", _shipped(name, source)
        else:
            found = _find(name, source, folder)
            if found is None:
                return row | {"present": False, "verified": "missing"}
            row["where"] = str(found[0])
            data = _data_set(name, source, *found)
    except UsageError as mistake:
        return row | {"verified": str(mistake)}
    owners = 0 if data.owners_train is None else len(np.unique(data.owners_train))
    return row | {"train": len(data.y_train), "test": len(data.y_test), "owners": owners}


def _find(name: str, source: Source, folder: Path) -> Found | None:
    path = folder / f"{name}.npz"
    return (path, read_npz(path)) if path.exists() else source.find(folder)


def _how_to_get(name: str, source: Source, folder: Path) -> str:
    keys = "x_train, y_train, x_test, y_test" + (", u_train, u_test" if source.owners else "")
    forms = f"{name}.npz (with {keys})" + (f" or {source.form}" if source.form else "")
    download = ", or `pip install 'fedskew[hub]'` to fetch it" if name in hub.HUB else ""
    return f"{name} is not in {folder}: expected {forms}{download}."


def _data_set(name: str, source: Source, where: Path, arrays: Arrays) -> DataSet:
    with reading(where):
        for key in ("x_test", "y_test", *(("u_train", "u_test") if source.owners else ())):
            if key not in arrays:
                raise ValueError(f"it has {', '.join(arrays)}, expected {key}")
        x_train, y_train = _checked(source, arrays, "train", source.train)
        x_test, y_test = _checked(source, arrays, "test", source.test)
    mean, std = (source.mean, source.std) if source.mean else moments(x_train)
    owners = owner_codes(arrays)
    return DataSet(name, x_train, y_train, x_test, y_test, len(source.labels), *owners, mean, std, source.labels)


def _checked(source: Source, arrays: Arrays, part: str, published: tuple[int, ...]) -> tuple[Array, Array]:
    """Images and labels of one part; ValueError unless they are what was published under this name."""
    x, y, classes = arrays[f"x_{part}"], arrays[f"y_{part}"], len(source.labels)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or as_images(x[:1]).shape[1:] != source.size:
        size = ", ".join(map(str, source.size))
        raise ValueError(f"x_{part} is {x.dtype} of shape {x.shape}, expected uint8 [n, {size}]")
    if y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() < classes):
        raise ValueError(f"y_{part} has other labels, expected integers from 0 to {classes - 1}")
    counts = np.bincount(y, minlength=classes)
    if published and len(y) != sum(published):
        raise ValueError(f"it has {len(y)} {part} samples, expected {sum(published)} as published")
    for label, (count, wanted) in enumerate(zip(counts, published, strict=False)):
        if count != wanted:
            raise ValueError(f"class {label} has {count} {part} samples, expected {wanted} as published")
    return as_images(x), y.astype(np.int64)
