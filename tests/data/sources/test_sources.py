"""Named data sets: every file format, damaged files, fetching, the listing."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import pickle
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet, holdout_mask, moments, one_in
from fedskew.data.sources import loading as sources
from fedskew.data.sources.catalogue import SOURCES
from fedskew.data.sources.formats import read_npz, write_npz
from fedskew.data.sources.loading import default_folder, listing, load

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError


@pytest.fixture
def shrink(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Arrays]:
    """Pretends that a set was published with a few samples per class, and draws such a set."""

    def shrunk(name: str, train: int = 2, test: int = 1) -> Arrays:
        source = SOURCES[name]
        classes = len(source.labels)
        small = dataclasses.replace(source, train=(train,) * classes, test=(test,) * classes)
        monkeypatch.setitem(SOURCES, name, small)
        rng = np.random.default_rng(0)
        size = source.size if source.size[2] == 3 else source.size[:2]
        arrays = {}
        for part, count in (("train", train), ("test", test)):
            arrays[f"x_{part}"] = rng.integers(0, 256, (count * classes, *size), np.uint8)
            arrays[f"y_{part}"] = rng.permutation(np.repeat(np.arange(classes, dtype=np.uint8), count))
            if source.owners:
                arrays[f"u_{part}"] = rng.integers(0, 5, count * classes).astype(np.int32)
        return arrays

    return shrunk


def same(data: DataSet, arrays: Arrays) -> bool:
    """Whether a loaded set holds these arrays, in the promised types."""
    size = SOURCES[data.name].size
    return (
        np.array_equal(data.x_train, arrays["x_train"].reshape(-1, *size))
        and np.array_equal(data.x_test, arrays["x_test"].reshape(-1, *size))
        and np.array_equal(data.y_train, arrays["y_train"])
        and np.array_equal(data.y_test, arrays["y_test"])
        and data.x_train.dtype == data.x_test.dtype == np.uint8
        and data.y_train.dtype == data.y_test.dtype == np.int64
    )


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, arrays: Arrays, stem: str = "", test: str = "t10k", zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, word in (("train", "train"), ("test", test)):
        for key, what in ((f"x_{part}", "images-idx3"), (f"y_{part}", "labels-idx1")):
            raw = idx_bytes(arrays[key])
            path = folder / f"{stem}{word}-{what}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw, 1))
            else:
                path.write_bytes(raw)


def cifar_files(arrays: Arrays) -> dict[str, bytes]:
    """CIFAR-10 as published: five training batches and one test batch, rows of 3 x 32 x 32 bytes, byte keys."""
    files = {}
    for i, part in enumerate(np.array_split(np.arange(len(arrays["y_train"])), 5), start=1):
        files[f"data_batch_{i}"] = (arrays["x_train"][part], arrays["y_train"][part])
    files["test_batch"] = (arrays["x_test"], arrays["y_test"])
    return {
        name: pickle.dumps(
            {b"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), b"labels": y.tolist(), b"batch_label": b"batch"},
            protocol=4,
        )
        for name, (x, y) in files.items()
    }


# The embedded set.


def test_digits_need_no_file_and_keep_36_of_each_class_for_testing(tmp_path: Path) -> None:
    data = load("digits", tmp_path)
    assert data.shape == (1, 8, 8)
    assert data.x_train.shape == (1437, 8, 8, 1)
    assert data.x_train.dtype == np.uint8
    assert np.bincount(data.y_test).tolist() == [36] * 10
    assert (int(data.x_train.min()), int(data.x_train.max())) == (0, 255)
    assert set(np.unique(data.x_train)) == {round(level * 255 / 16) for level in range(17)}
    assert data.mean == pytest.approx(((data.x_train / 255).mean(),))
    assert data.std == pytest.approx(((data.x_train / 255).std(),))


def test_digits_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """The draw is from raw PCG64 bits, so these figures may never change."""
    data = load("digits", tmp_path)
    assert data.y_test[:12].tolist() == [2, 3, 1, 3, 5, 0, 1, 5, 0, 8, 0, 3]
    assert int(data.x_test.astype(np.int64).sum()) == 1792849


def test_digits_lose_and_repeat_no_sample() -> None:
    from sklearn.datasets import load_digits

    pool = load("digits").pooled()
    ours = sorted(map(bytes, pool.x_train.reshape(1797, 64)))
    theirs = np.round(load_digits().data * 255 / 16).astype(np.uint8)
    assert ours == sorted(map(bytes, theirs))


# File formats.


def test_an_npz_is_loaded_and_memory_mapped(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("cifar10")
    np.savez(tmp_path / "cifar10.npz", **arrays)
    data = load("cifar10", tmp_path)
    assert same(data, arrays)
    assert data.shape == (3, 32, 32)
    assert data.mean == (125.3 / 255, 123.0 / 255, 113.9 / 255)
    base = data.x_train
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)


def test_writing_into_a_mapped_set_leaves_its_file_alone(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("mnist")
    np.savez(tmp_path / "mnist.npz", **arrays)
    torch.from_numpy(load("mnist", tmp_path).x_train).zero_()
    assert same(load("mnist", tmp_path), arrays)


def test_compressed_and_fortran_ordered_npz_load(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("mnist")
    np.savez_compressed(tmp_path / "mnist.npz", **arrays)
    assert same(load("mnist", tmp_path), arrays)
    np.savez(tmp_path / "mnist.npz", **{key: np.asfortranarray(value) for key, value in arrays.items()})
    assert same(load("mnist", tmp_path), arrays)


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_loads_from_its_original_files(
    tmp_path: Path, shrink: Callable[..., Arrays], place: str, zipped: bool
) -> None:
    arrays = shrink("mnist")
    write_idx(tmp_path / place, arrays, zipped=zipped)
    assert same(load("mnist", tmp_path), arrays)


def test_idx_files_in_the_folder_itself_could_be_either_mnist(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    write_idx(tmp_path, shrink("mnist"))
    with pytest.raises(UsageError, match="mnist is not in"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("place", ["", "emnist-letters"])
def test_emnist_letters_are_turned_upright_and_counted_from_zero(
    tmp_path: Path, shrink: Callable[..., Arrays], place: str
) -> None:
    arrays = shrink("emnist-letters")
    stored = {key: a.transpose(0, 2, 1) if key[0] == "x" else a + 1 for key, a in arrays.items()}
    write_idx(tmp_path / place, stored, "emnist-letters-", "test")
    data = load("emnist-letters", tmp_path)
    assert same(data, arrays)
    assert data.x_train.flags.c_contiguous
    assert data.labels[int(data.y_train[0])] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[int(arrays["y_train"][0])]


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "cifar10/cifar-10-batches-py"])
def test_cifar10_loads_from_its_batches(tmp_path: Path, shrink: Callable[..., Arrays], place: str) -> None:
    arrays = shrink("cifar10", train=5)
    (tmp_path / place).mkdir(parents=True)
    for name, raw in cifar_files(arrays).items():
        (tmp_path / place / name).write_bytes(raw)
    assert same(load("cifar10", tmp_path), arrays)


def test_cifar10_loads_from_the_published_archive(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("cifar10", train=5)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, raw in cifar_files(arrays).items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    assert same(load("cifar10", tmp_path), arrays)


def test_a_batch_pickled_by_python_2_loads(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    """The published files are protocol 2 with byte strings, which only the old opcodes say: written here by hand."""
    arrays = shrink("cifar100", train=1)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for part in ("train", "test"):
        rows = arrays[f"x_{part}"].transpose(0, 3, 1, 2).tobytes()
        shape = f"I{len(arrays[f'y_{part}'])}\nI3072\nt".encode()
        array = (
            *(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(", shape),
            *(b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n", b"T"),
            *(len(rows).to_bytes(4, "little"), rows, b"tb"),
        )
        labels = b"(" + b"".join(b"I%d\n" % y for y in arrays[f"y_{part}"]) + b"l"
        (folder / part).write_bytes(b"(dS'data'\n" + b"".join(array) + b"sS'fine_labels'\n" + labels + b"s.")
    assert same(load("cifar100", tmp_path), arrays)


def test_svhn_loads_from_mat_files_and_its_label_10_is_digit_0(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    from scipy.io import savemat

    arrays = shrink("svhn")
    for part in ("train", "test"):
        y = arrays[f"y_{part}"].copy()
        y[y == 0] = 10
        mat = {"X": arrays[f"x_{part}"].transpose(1, 2, 3, 0), "y": y[:, None]}
        savemat(tmp_path / f"{part}_32x32.mat", mat)
    assert same(load("svhn", tmp_path), arrays)


def test_writers_are_loaded_with_their_samples(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("mnist-writers")
    np.savez(tmp_path / "mnist-writers.npz", **arrays)
    data = load("mnist-writers", tmp_path)
    assert data.owners_train is not None
    assert data.owners_test is not None
    assert data.owners_train.dtype == np.int64
    assert np.array_equal(data.owners_train, arrays["u_train"])
    assert np.array_equal(data.owners_test, arrays["u_test"])


def test_pooling_moves_everything_to_the_training_part(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("mnist-writers")
    np.savez(tmp_path / "mnist-writers.npz", **arrays)
    data = load("mnist-writers", tmp_path)
    pool = data.pooled()
    assert np.array_equal(pool.x_train[20:], data.x_test)
    assert np.array_equal(pool.y_train, np.concatenate([data.y_train, data.y_test]))
    assert np.array_equal(pool.owners_train, np.concatenate([arrays["u_train"], arrays["u_test"]]))
    assert len(pool.x_test) == len(pool.y_test) == len(pool.owners_test) == 0
    assert (pool.shape, pool.mean) == (data.shape, data.mean)


# Damaged files.


def damage(change: Callable[[Arrays], Any]) -> Callable[[Path, Arrays], None]:
    def write(path: Path, arrays: Arrays) -> None:
        np.savez(path, **(change(arrays) or arrays))

    return write


def cut(path: Path, arrays: Arrays) -> None:
    np.savez(path, **arrays)
    path.write_bytes(path.read_bytes()[:-300])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (cut, "not a zip file"),
        (lambda path, a: path.write_bytes(b"hello"), "not a zip file"),
        (
            damage(lambda a: {"images": a["x_train"], "y_train": a["y_train"]}),
            "it has images, y_train, expected x_train",
        ),
        (damage(lambda a: a.pop("y_test") is None), "expected y_test"),
        (
            damage(lambda a: a | {"y_train": a["y_train"][:-1]}),
            "y_train has shape (19,), expected one entry per sample",
        ),
        (
            damage(lambda a: a | {"y_train": a["y_train"] + 1}),
            "y_train has other labels, expected integers from 0 to 9",
        ),
        (
            damage(lambda a: a | {"y_train": a["y_train"] * 0.5}),
            "y_train is float64 of shape (20,), expected integers or text",
        ),
        (damage(lambda a: a | {"y_train": a["y_train"].astype(object)}), "allow_pickle=False"),
        (damage(lambda a: a | {"x_train": a["x_train"] / 255}), "x_train is float64"),
        (damage(lambda a: a | {"x_test": a["x_test"][:, :20]}), "x_test is uint8 of shape (10, 20, 28)"),
        (damage(lambda a: {k: v[:-1] for k, v in a.items()}), "19 train samples, expected 20 as published"),
        (
            damage(lambda a: a | {"y_test": np.sort(a["y_test"]) // 2}),
            "class 0 has 2 test samples, expected 1 as published",
        ),
    ],
)
def test_a_damaged_npz_is_named_with_its_problem(
    tmp_path: Path, shrink: Callable[..., Arrays], write: Callable[[Path, Arrays], None], problem: str
) -> None:
    path = tmp_path / "mnist.npz"
    write(path, shrink("mnist"))
    with pytest.raises(UsageError) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


def test_a_set_with_writers_needs_a_file_with_writers(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    arrays = shrink("mnist-writers")
    np.savez(tmp_path / "mnist-writers.npz", **{key: a for key, a in arrays.items() if key[0] != "u"})
    with pytest.raises(UsageError, match="expected u_train"):
        load("mnist-writers", tmp_path)


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (lambda raw: b"\0\0\x0d" + raw[3:], "starts with 00000d03"),
        (lambda raw: raw[:-1], "15679 bytes of data, expected 20x28x28 as its header says"),
        (lambda raw: raw[:6], "expected an idx header"),
        (lambda raw: b"", "nothing"),
    ],
)
def test_a_damaged_idx_file_is_named_with_its_problem(
    tmp_path: Path, shrink: Callable[..., Arrays], damaged: Callable[[bytes], bytes], problem: str
) -> None:
    write_idx(tmp_path / "mnist", shrink("mnist"), zipped=False)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(UsageError) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


def test_a_truncated_gz_and_a_missing_file_of_four_are_errors(tmp_path: Path, shrink: Callable[..., Arrays]) -> None:
    write_idx(tmp_path / "mnist", shrink("mnist"))
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"t10k-images-idx3-ubyte.gz cannot be used"):
        load("mnist", tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match=r"expected t10k-images-idx3-ubyte.gz, which is missing"):
        load("mnist", tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("raw", [pickle.dumps({b"data": Evil(), b"labels": []}), b"junk", pickle.dumps({b"data": []})])
def test_a_cifar_batch_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(raw)
    with pytest.raises(UsageError, match=r"cifar-10-batches-py cannot be used: data_batch_1"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cifar-100-python.tar.gz"
    path.write_bytes(b"\x1f\x8b not a tar")
    with pytest.raises(UsageError, match=r"cifar-100-python.tar.gz cannot be used"):
        load("cifar100", tmp_path)


def test_a_damaged_svhn_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train_32x32.mat").write_bytes(b"x" * 200)
    with pytest.raises(UsageError, match=r"train_32x32.mat cannot be used"):
        load("svhn", tmp_path)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        load("cifar-10")


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("digits", "heart")])
def test_a_missing_set_says_which_file_is_expected_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(name, tmp_path)
    sentence = str(caught.value)
    assert f"{name} is not in {tmp_path}: expected {name}.npz" in sentence
    assert ("fedskew[hub]" in sentence) == (name != "mnist-writers")
    assert ("u_train" in sentence) == SOURCES[name].owners


# Fetching.


class Split(list[dict[str, Any]]):
    """What `datasets` gives: rows by iteration, columns by name."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[Any]]:
    """Puts a fake `datasets` in place; returns the list of what was asked of it."""

    def served(answer: Callable[..., Any]) -> list[Any]:
        asked: list[Any] = []
        module = types.ModuleType("datasets")

        def load_dataset(*arguments: Any) -> Any:
            asked.append(arguments)
            return answer()

        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return served


def rows(arrays: Arrays, part: str, image: str = "image", label: str = "label") -> Split:
    pairs = zip(arrays[f"x_{part}"], arrays[f"y_{part}"].tolist(), strict=True)
    return Split({image: Image.fromarray(x), label: y} for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "asked", "image", "label"),
    [
        ("mnist", ("ylecun/mnist", None), "image", "label"),
        ("fmnist", ("zalando-datasets/fashion_mnist", None), "image", "label"),
        ("cifar10", ("uoft-cs/cifar10", None), "img", "label"),
        ("cifar100", ("uoft-cs/cifar100", None), "img", "fine_label"),
        ("svhn", ("ufldl-stanford/svhn", "cropped_digits"), "image", "label"),
    ],
)
def test_a_missing_set_is_fetched_once_and_written_to_the_folder(
    tmp_path: Path, shrink: Callable[..., Arrays], serve: Any, name: str, asked: Any, image: str, label: str
) -> None:
    arrays = shrink(name)
    calls = serve(lambda: {part: rows(arrays, part, image, label) for part in ("train", "test")})
    folder = tmp_path / "new"
    assert same(load(name, folder), arrays)
    assert same(load(name, folder), arrays)
    assert calls == [asked]
    assert [path.name for path in folder.iterdir()] == [f"{name}.npz"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("lying", [False, True])
def test_fetched_letters_are_upright_and_counted_from_zero(
    tmp_path: Path, shrink: Callable[..., Arrays], serve: Any, first: int, lying: bool
) -> None:
    arrays = shrink("emnist-letters")
    for part in ("train", "test"):
        letter_i = np.zeros((28, 28), np.uint8)
        letter_i[3:25, 13:15] = 255
        arrays[f"x_{part}"][arrays[f"y_{part}"] == 8] = letter_i
        for other in (7, 9):  # wider than tall: the turn must not be decided by the neighbours of I
            arrays[f"x_{part}"][arrays[f"y_{part}"] == other] = letter_i.T
    stored = {k: (a.transpose(0, 2, 1) if lying else a) if k[0] == "x" else a + first for k, a in arrays.items()}
    serve(lambda: {part: rows(stored, part) for part in ("train", "test")})
    assert same(load("emnist-letters", tmp_path), arrays)


def test_fetched_femnist_keeps_its_writers_and_a_tenth_of_each_for_testing(tmp_path: Path, serve: Any) -> None:
    """Writers with 20 and 10 samples: 2 and 1 of them are tested on. Writers are numbered in sorted order."""
    picture = np.arange(784, dtype=np.uint8).reshape(28, 28)
    writers = ["f0002_01"] * 20 + ["f0001_07"] * 10
    split = Split(
        {"image": Image.fromarray(picture), "character": i % 62, "writer_id": w} for i, w in enumerate(writers)
    )
    serve(lambda: {"train": split})
    data = load("femnist", tmp_path)
    assert np.bincount(data.owners_train).tolist() == [9, 18]
    assert np.bincount(data.owners_test).tolist() == [1, 2]
    assert sorted([*data.y_train, *data.y_test]) == list(range(30))
    assert np.array_equal(data.x_test[0, :, :, 0], picture)
    again = load("femnist", tmp_path)  # now from the file
    assert np.array_equal(again.owners_train, data.owners_train)


def test_a_failed_or_wrong_fetch_is_an_error_and_leaves_no_file(
    tmp_path: Path, shrink: Callable[..., Arrays], serve: Any
) -> None:
    arrays = shrink("mnist")

    def offline() -> Any:
        raise ConnectionError("no route to host")

    serve(offline)
    with pytest.raises(UsageError, match="mnist could not be fetched from ylecun/mnist: no route to host"):
        load("mnist", tmp_path)
    serve(lambda: {"train": rows(arrays, "test"), "test": rows(arrays, "test")})
    with pytest.raises(UsageError, match="10 train samples, expected 20 as published"):
        load("mnist", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_called_datasets_is_not_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    with pytest.raises(UsageError, match="mnist is not in"):
        load("mnist", tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "set.npz"
    arrays = {key: np.arange(4)[:, None] if key[0] == "x" else np.arange(4) for key in ("x_train", "y_train")}
    write_npz(path, arrays)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UsageError, match="cannot be written: No space left"):
        write_npz(path, arrays)
    assert [p.name for p in tmp_path.iterdir()] == ["set.npz"]
    assert np.array_equal(read_npz(path)["y_train"], np.arange(4))


# The data folder, the listing, test parts.


def test_the_data_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDSKEW_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    home = Path.home()
    for platform, wanted in (("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")):
        monkeypatch.setattr(sys, "platform", platform)
        assert default_folder() == home / wanted / "fedskew"
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert default_folder() == Path("/local/fedskew")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/fedskew")
    monkeypatch.setenv("FEDSKEW_DATA", "~/sets")
    assert default_folder() == home / "sets"


def test_the_listing_says_which_sets_are_present_missing_or_damaged(
    tmp_path: Path, shrink: Callable[..., Arrays]
) -> None:
    np.savez(tmp_path / "mnist-writers.npz", **shrink("mnist-writers"))
    (tmp_path / "cifar10.npz").write_bytes(b"PK")
    table = {row["name"]: row for row in listing(tmp_path)}
    assert set(table) == set(SOURCES)
    assert table["digits"]["verified"] == "ok"
    assert table["svhn"] == {
        "name": "svhn",
        "present": False,
        "where": str(tmp_path),
        "train": 73257,
        "test": 26032,
        "shape": (3, 32, 32),
        "classes": 10,
        "owners": 0,
        "verified": "missing",
    }
    writers = table["mnist-writers"]
    assert (writers["present"], writers["train"], writers["test"], writers["verified"]) == (True, 20, 10, "ok")
    assert writers["owners"] == 5
    assert table["cifar10"]["present"]
    assert "cifar10.npz cannot be used" in table["cifar10"]["verified"]


def test_the_listing_fetches_nothing(tmp_path: Path, serve: Any) -> None:
    asked = serve(dict)
    listing(tmp_path)
    assert not asked


def test_the_catalogue_agrees_with_the_published_totals() -> None:
    totals = {name: (sum(s.train), sum(s.test), len(s.labels)) for name, s in SOURCES.items()}
    assert totals == {
        "digits": (1437, 360, 10),
        "heart": (736, 184, 2),
        "mnist": (60000, 10000, 10),
        "mnist-writers": (60000, 10000, 10),
        "fmnist": (60000, 10000, 10),
        "emnist-letters": (124800, 20800, 26),
        "femnist": (0, 0, 62),
        "cifar10": (50000, 10000, 10),
        "cifar100": (50000, 10000, 100),
        "svhn": (73257, 26032, 10),
    }
    for source in SOURCES.values():
        assert len(set(source.labels)) == len(source.labels)
        assert len(source.mean) == len(source.std)
        assert len(source.mean) in (0, source.size[-1])


def test_the_holdout_mask_takes_the_given_number_of_each_group() -> None:
    """Groups of 10, 8, 2 and 1: one in five, rounded, at least one, never all: 2, 2, 1, 0."""
    groups = np.array([7] * 10 + [3] * 8 + [2] * 2 + [5])
    mask = holdout_mask(groups, one_in(5))
    assert [int(mask[groups == g].sum()) for g in (7, 3, 2, 5)] == [2, 2, 1, 0]
    assert np.array_equal(mask, holdout_mask(groups, one_in(5)))


def test_moments_are_the_mean_and_deviation_of_the_pixels() -> None:
    x = np.random.default_rng(0).integers(0, 256, (7, 5, 4, 3), np.uint8)
    x[..., 2] = 51
    mean, std = moments(x)
    assert mean == pytest.approx((x / 255).mean(axis=(0, 1, 2)))
    assert std[:2] == pytest.approx((x / 255).std(axis=(0, 1, 2))[:2])
    assert mean[2] == pytest.approx(0.2)
    assert std[2] == pytest.approx(1.0)  # constant: nothing to divide by


def test_the_real_mnist_is_what_the_catalogue_says() -> None:
    if "FEDSKEW_DATA" not in os.environ or not (sources.default_folder() / "mnist.npz").exists():
        pytest.skip("FEDSKEW_DATA names no folder with MNIST")
    data = load("mnist")
    mean, std = moments(data.x_train)
    assert mean == pytest.approx(data.mean, abs=5e-5)
    assert std == pytest.approx(data.std, abs=5e-5)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    ours, theirs = load("digits"), load_digits()
    images = np.concatenate([ours.x_train, ours.x_test])[..., 0]
    labels = np.concatenate([ours.y_train, ours.y_test])
    expected = np.round(theirs.images * 255 / 16).astype(np.uint8)
    ordered = [np.lexsort(x.reshape(len(x), -1).T) for x in (images, expected)]
    assert np.array_equal(images[ordered[0]], expected[ordered[1]])
    assert np.array_equal(np.bincount(labels), np.bincount(theirs.target))
