"""The named data sets: image size, class names, published counts, and the files each may be read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedskew.data.dataset import Arrays, holdout_mask, split_off_test
from fedskew.data.sources.formats import cifar_set, idx_set, mat_set

Found = tuple[Path, Arrays]  # where a set was found, and what was there
Find = Callable[[Path], Found | None]


def _nothing(folder: Path) -> None:
    return None


@dataclass(frozen=True)
class Source:
    """A named data set: what a file of that name must hold, and where to look for it.

    size: height, width, channels of an image.
    labels: the names of the classes.
    train, test: samples of each class as published; () does not check them, where versions of the set differ.
    mean, std: per channel, for normalisation; () computes them from the training images.
    owners: whether the set must say who made each sample.
    find: looks in the data folder for forms other than <name>.npz.
    form: those forms in words, for the error message.
    table: the query of a table that ships with the package as <name>.csv; "" for images.
    """

    size: tuple[int, ...]
    labels: tuple[str, ...]
    train: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    owners: bool = False
    find: Find = _nothing
    form: str = ""
    table: str = ""


def _digits(folder: Path) -> Found:
    # the file that scikit-learn ships, read directly: importing sklearn.datasets takes a second
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    table = np.loadtxt(Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = np.round(table[:, :-1].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    return Path("scikit-learn"), split_off_test({"x_train": x, "y_train": y}, holdout_mask(y, lambda n: 36))


def _idx(*places: str, stem: str = "", test: str = "t10k") -> Find:
    def find(folder: Path) -> Found | None:
        for place in places:
            if arrays := idx_set(folder / place, stem, test):
                return folder / place, arrays
        return None

    return find


def _letters(folder: Path) -> Found | None:
    """EMNIST stores images column by column, and labels from 1."""
    find = _idx("emnist-letters", "EMNIST/raw", ".", stem="emnist-letters-", test="test")
    if not (found := find(folder)):
        return None
    turned = {key: found[1][key].swapaxes(1, 2) for key in ("x_train", "x_test")}
    return found[0], turned | {key: found[1][key].astype(np.int64) - 1 for key in ("y_train", "y_test")}


def _cifar(name: str, stem: str, inner: str, train: list[str], test: str, label: str) -> Find:
    def find(folder: Path) -> Found | None:
        for place in (folder / name, folder):
            for path in (place / inner, place / f"{stem}-python.tar.gz"):
                if path.exists():
                    return path, cifar_set(path, train, test, label)
        return None

    return find


def _svhn(folder: Path) -> Found | None:
    for place in (folder / "svhn", folder):
        if arrays := mat_set(place):
            return place, arrays
    return None


DIGITS = tuple("0123456789")
CAPITALS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
SMALL = tuple("abcdefghijklmnopqrstuvwxyz")
CIFAR100 = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""

MNIST = Source(
    size=(28, 28, 1),
    labels=DIGITS,
    train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    mean=(0.1307,),
    std=(0.3081,),
    find=_idx("mnist", "MNIST/raw"),
    form="mnist/ with the four original idx files (train-images-idx3-ubyte.gz, ...)",
)

SOURCES: dict[str, Source] = {
    "digits": Source(
        size=(8, 8, 1),
        labels=DIGITS,
        train=(142, 146, 141, 147, 145, 146, 145, 143, 138, 144),
        test=(36,) * 10,
        find=_digits,
    ),
    "heart": Source(  # CC BY 4.0, see heart.NOTICE
        size=(13,),
        labels=("healthy", "disease"),
        train=(329, 407),
        test=(82, 102),
        owners=True,
        table="label=disease&owner=hospital&categorical=cp,restecg,slope,thal",
    ),
    "mnist": MNIST,
    "mnist-writers": Source(MNIST.size, MNIST.labels, MNIST.train, MNIST.test, MNIST.mean, MNIST.std, owners=True),
    "fmnist": Source(
        size=(28, 28, 1),
        labels=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        train=(6000,) * 10,
        test=(1000,) * 10,
        mean=(0.2860,),
        std=(0.3530,),
        find=_idx("fmnist", "FashionMNIST/raw"),
        form="fmnist/ with the four original idx files (train-images-idx3-ubyte.gz, ...)",
    ),
    "emnist-letters": Source(
        size=(28, 28, 1),
        labels=CAPITALS,
        train=(4800,) * 26,
        test=(800,) * 26,
        mean=(0.1722,),
        std=(0.3309,),
        find=_letters,
        form="the four original files emnist-letters-train-images-idx3-ubyte.gz, ...",
    ),
    "femnist": Source(  # white paper, unlike the MNIST family
        size=(28, 28, 1), labels=DIGITS + CAPITALS + SMALL, mean=(0.9637,), std=(0.1592,), owners=True
    ),
    "cifar10": Source(
        size=(32, 32, 3),
        labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        train=(5000,) * 10,
        test=(1000,) * 10,
        mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
        std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
        find=_cifar(
            *("cifar10", "cifar-10", "cifar-10-batches-py"),
            *([f"data_batch_{i}" for i in range(1, 6)], "test_batch", "labels"),
        ),
        form="cifar-10-python.tar.gz (or unpacked, cifar-10-batches-py/)",
    ),
    "cifar100": Source(
        size=(32, 32, 3),
        labels=tuple(CIFAR100.split()),
        train=(500,) * 100,
        test=(100,) * 100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        find=_cifar("cifar100", "cifar-100", "cifar-100-python", ["train"], "test", "fine_labels"),
        form="cifar-100-python.tar.gz (or unpacked, cifar-100-python/)",
    ),
    "svhn": Source(
        size=(32, 32, 3),
        labels=DIGITS,
        train=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        test=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        find=_svhn,
        form="train_32x32.mat and test_32x32.mat",
    ),
}
