"""Data sets fetched from the Hugging Face hub, if the extra `fedskew[hub]` is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, Arrays, holdout_mask, one_in, split_off_test


@dataclass(frozen=True)
class Hub:
    """Where a named data set is on the hub, and what its columns are called. `owner`: "" if there is no such column."""

    repository: str
    config: str | None = None
    image: str = "image"
    label: str = "label"
    owner: str = ""


HUB = {
    "mnist": Hub("ylecun/mnist"),
    "fmnist": Hub("zalando-datasets/fashion_mnist"),
    "cifar10": Hub("uoft-cs/cifar10", image="img"),
    "cifar100": Hub("uoft-cs/cifar100", image="img", label="fine_label"),
    "emnist-letters": Hub("tanganke/emnist_letters"),
    "svhn": Hub("ufldl-stanford/svhn", "cropped_digits"),
    "femnist": Hub("flwrlabs/femnist", label="character", owner="writer_id"),
}


def available() -> bool:
    """Whether the package `datasets` is installed."""
    try:  # a folder called datasets can be imported, too, but has no load_dataset
        return hasattr(importlib.import_module("datasets"), "load_dataset")
    except ImportError:
        return False


def fetch(name: str, shape: tuple[int, int, int]) -> Arrays:
    """Download a named data set. Without a test part, a tenth of each owner's samples becomes one.

    shape: height, width, channels of an image.
    """
    hub = HUB[name]
    try:
        splits = importlib.import_module("datasets").load_dataset(hub.repository, hub.config)
        arrays = _arrays(hub, splits["train"], "train", shape)
        if "test" in splits:
            arrays |= _arrays(hub, splits["test"], "test", shape)
    except Exception as error:  # network, disk or a changed repository
        raise UsageError(
            f"{name} could not be fetched from {hub.repository}: {error or type(error).__name__}."
        ) from error
    if "x_test" not in arrays:
        arrays = split_off_test(arrays, holdout_mask(arrays["u_train"], one_in(10)))
    return upright(arrays) if name == "emnist-letters" else arrays


def _arrays(hub: Hub, split: Any, part: str, shape: tuple[int, int, int]) -> Arrays:
    images = np.empty((len(split), *shape), np.uint8)
    mode = "L" if shape[2] == 1 else "RGB"
    for i, row in enumerate(split):
        images[i] = np.asarray(row[hub.image].convert(mode)).reshape(shape)
    arrays: Arrays = {f"x_{part}": images, f"y_{part}": np.asarray(list(split[hub.label]), np.int64)}
    if hub.owner:
        arrays[f"u_{part}"] = np.asarray(list(split[hub.owner]))
    return arrays


def upright(arrays: Arrays) -> Arrays:
    """EMNIST letters turned upright, labels from 0: the copies on the hub differ in both."""
    first = int(arrays["y_train"].min())
    letter_i = arrays["x_train"][arrays["y_train"] == first + 8].mean(axis=(0, 3))
    lying = _variance(letter_i.sum(axis=1)) < _variance(letter_i.sum(axis=0))  # an I is taller than it is wide
    turned = {key: arrays[key].transpose(0, 2, 1, 3) if lying else arrays[key] for key in ("x_train", "x_test")}
    return arrays | turned | {key: arrays[key] - first for key in ("y_train", "y_test")}


def _variance(profile: Array) -> float:
    """Of the position, weighted by the profile."""
    place = np.arange(len(profile))
    weight = profile / max(float(profile.sum()), 1e-9)
    return float(weight @ (place - weight @ place) ** 2)
