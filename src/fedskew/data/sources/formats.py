"""File formats of data sets: npz, idx(.gz), CIFAR's python batches, SVHN's mat.

Readers return plain arrays. A damaged file raises a `UsageError` that names the file and the problem.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, Arrays

KEYS = ("x_train", "y_train", "x_test", "y_test", "u_train", "u_test")


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn any exception inside into a `UsageError` about the file at `path`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # parsers raise anything on a damaged file
        problem = str(error).strip().rstrip(".") or type(error).__name__
        raise UsageError(f"{path} cannot be used: {problem}.") from error


def read_npz(path: Path, *, strict: bool = False) -> Arrays:
    """The arrays of an .npz. Images that are stored uncompressed are memory-mapped, copy on write.

    `strict` refuses arrays of other names, which may be misspelt; otherwise they are not read.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        others = [name for name in members if name not in KEYS]
        if strict and others and "x_train" in members:
            raise ValueError(f"it has {others[0]}, expected only {', '.join(KEYS)}")
        arrays = {key: _member(path, archive, members[key]) for key in KEYS if key in members}
        check_arrays(arrays, found=list(members))
    return arrays


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as stream:
        if info.compress_type == zipfile.ZIP_STORED and npy.read_magic(stream) == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(stream)
            # Only bytes are mapped: wider numbers may lie at an odd address inside the archive.
            if dtype == np.uint8 and not fortran and np.prod(shape):
                if info.file_size != stream.tell() + np.prod(shape):
                    raise ValueError(f"{info.filename} is shorter than its header says")
                return _mapped(path, info.header_offset, stream.tell(), shape)
    with archive.open(info) as stream:
        array: Array = npy.read_array(stream, allow_pickle=False)
        return array


def _mapped(path: Path, member: int, skip: int, shape: tuple[int, ...]) -> Array:
    with path.open("rb") as raw:
        raw.seek(member + 26)  # the local header ends with the lengths of a name and of an extra field
        name, extra = struct.unpack("<HH", raw.read(4))
    # Copy on write: the arrays look writable (torch insists), the file stays as it is.
    return np.memmap(path, np.uint8, "c", member + 30 + name + extra + skip, shape).view(np.ndarray)


def write_npz(path: Path, arrays: Arrays) -> None:
    """Write an .npz, under another name first and then renamed: a reader sees the whole file or none."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def check_arrays(arrays: Arrays, found: list[str]) -> None:
    """Raise ValueError unless the arrays can be one data set. `found`: the names that the message says were there."""
    for key in ("x_train", "y_train", *(["y_test"] if "x_test" in arrays else [])):
        if key not in arrays:
            raise ValueError(f"it has {', '.join(found) or 'nothing'}, expected {key}")
    for key, array in arrays.items():
        images = arrays.get(f"x_{key[2:]}")
        if images is None or array.ndim == 0 or len(array) != len(images):
            raise ValueError(f"{key} has shape {array.shape}, expected one entry per sample of x_{key[2:]}")
        if key[0] in "yu" and (array.ndim != 1 or array.dtype.kind not in "biuU"):
            what = "class" if key[0] == "y" else "owner"
            raise ValueError(
                f"{key} is {array.dtype} of shape {array.shape}, expected integers or text, one {what} each"
            )
        if key[0] == "x" and (array.ndim < 2 or array.dtype.kind not in "biuf"):
            raise ValueError(f"{key} is {array.dtype} of shape {array.shape}, expected numbers [n, ...]")
    if not len(arrays["x_train"]):
        raise ValueError("it has no training samples, expected at least one")


def read_idx(path: Path) -> Array:
    """An array of bytes in LeCun's idx format: two zeros, the type (8: bytes), the rank, the sizes, the data."""
    with reading(path):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            raw = bytearray(stream.read())  # so that the array is writable
        if raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
            raise ValueError(
                f"it starts with {bytes(raw[:4]).hex() or 'nothing'}, expected an idx header of bytes (000008..)"
            )
        shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
        body = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
        if body.size != np.prod(shape):
            raise ValueError(
                f"it has {body.size} bytes of data, expected {'x'.join(map(str, shape))} as its header says"
            )
        return body.reshape(shape)


def idx_set(folder: Path, stem: str, test: str) -> Arrays | None:
    """The set in the four files `<stem>train-images-idx3-ubyte[.gz]`, `<stem><test>-labels-...`; None if absent."""
    paths: dict[str, Path] = {}
    for key, part, what in (
        ("x_train", "train", "images-idx3"),
        ("y_train", "train", "labels-idx1"),
        ("x_test", test, "images-idx3"),
        ("y_test", test, "labels-idx1"),
    ):
        plain = folder / f"{stem}{part}-{what}-ubyte"
        paths[key] = plain if plain.exists() else plain.with_name(plain.name + ".gz")
    missing = [path.name for path in paths.values() if not path.exists()]
    if len(missing) == len(paths):
        return None
    if missing:
        raise UsageError(f"{folder} has part of a data set: expected {missing[0]}, which is missing.")
    return {key: read_idx(path) for key, path in paths.items()}


class _SafeUnpickler(pickle.Unpickler):
    """Loads numpy arrays and Python's plain types; refuses any other class or function."""

    allowed = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, expected arrays and plain types only")
        return self.allowed[module, name]


def cifar_set(path: Path, train: list[str], test: str, label: str) -> Arrays:
    """CIFAR's python batches, from a folder or the published .tar.gz.

    train, test: the files of each part. label: the key of the labels.
    """
    with reading(path), contextlib.ExitStack() as stack:
        if path.is_dir():
            read: Callable[[str], bytes] = lambda name: (path / name).read_bytes()  # noqa: E731
        else:
            archive = stack.enter_context(tarfile.open(path))
            members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
            read = lambda name: archive.extractfile(members[name]).read()  # type: ignore[union-attr]  # noqa: E731
        batches = {name: _batch(read, name, label) for name in (*train, test)}
    return {
        "x_train": np.concatenate([batches[name][0] for name in train]),
        "y_train": np.concatenate([batches[name][1] for name in train]),
        "x_test": batches[test][0],
        "y_test": batches[test][1],
    }


def _batch(read: Callable[[str], bytes], name: str, label: str) -> tuple[Array, Array]:
    try:
        batch = _SafeUnpickler(io.BytesIO(read(name)), encoding="bytes").load()
        x, y = (batch[key.encode()] if key.encode() in batch else batch[key] for key in ("data", label))
        images = np.ascontiguousarray(np.asarray(x, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return images, np.asarray(y, np.int64)
    except Exception as error:
        raise ValueError(f"{name}: {error or type(error).__name__}") from error


def mat_set(folder: Path) -> Arrays | None:
    """SVHN's train_32x32.mat and test_32x32.mat, in which the digit 0 is stored as 10; None if absent."""
    from scipy.io import loadmat

    arrays: Arrays = {}
    paths = {part: folder / f"{part}_32x32.mat" for part in ("train", "test")}
    if not any(path.exists() for path in paths.values()):
        return None
    for part, path in paths.items():
        with reading(path):
            mat = loadmat(path, variable_names=["X", "y"])
            arrays[f"x_{part}"] = np.ascontiguousarray(mat["X"].transpose(3, 0, 1, 2))
            arrays[f"y_{part}"] = mat["y"].ravel().astype(np.int64) % 10
    return arrays
