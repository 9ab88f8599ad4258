"""The user's own data: folders of images, .npz, tables, torch Datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Column, moments
from fedskew.data.sources.loading import from_dataset, load


def picture(shade: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Image.Image:
    """Width and height as given; distinct pixels, the first of them `shade`."""
    w, h = size
    pixels = (np.arange(h * w * 3) + shade).astype(np.uint8).reshape(h, w, 3)
    return Image.fromarray(pixels if mode == "RGB" else pixels[..., 0])


def image_folder(folder: Path, counts: dict[str, int], **options: Any) -> Path:
    for label, count in counts.items():
        (folder / label).mkdir(parents=True)
        for i in range(count):
            picture(10 * i + len(label), **options).save(folder / label / f"{i}.png")
    return folder


# Folders of images.


def test_a_folder_per_class_gives_a_fifth_of_each_for_testing(tmp_path: Path) -> None:
    data = load(str(image_folder(tmp_path / "pets", {"dog": 10, "cat": 5})))
    assert (data.name, data.labels, data.classes) == ("pets", ("cat", "dog"), 2)
    assert data.shape == (3, 4, 6)
    assert data.x_train.shape == (12, 4, 6, 3)
    assert data.x_train.dtype == np.uint8
    assert np.bincount(data.y_train).tolist() == [4, 8]
    assert np.bincount(data.y_test).tolist() == [1, 2]
    assert data.y_train.dtype == np.int64


def test_pixels_and_labels_stay_together(tmp_path: Path) -> None:
    data = load(str(image_folder(tmp_path / "pets", {"horse": 5, "cat": 5}))).pooled()
    for x, y in zip(data.x_train, data.y_train, strict=True):
        assert int(x[0, 0, 0]) % 10 == len(data.labels[y])
        assert np.array_equal(x, np.asarray(picture(int(x[0, 0, 0]))))


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders_give_the_two_parts(tmp_path: Path, test: str) -> None:
    image_folder(tmp_path / "train", {"a": 3, "bb": 3})
    image_folder(tmp_path / test, {"a": 1, "bb": 2})
    data = load(f"{tmp_path}")
    assert np.bincount(data.y_train).tolist() == [3, 3]
    assert np.bincount(data.y_test).tolist() == [1, 2]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    data = load(str(image_folder(tmp_path / "vehicles", {"train": 5, "bus": 5})))
    assert data.labels == ("bus", "train")


def test_normalisation_is_measured_on_the_training_images(tmp_path: Path) -> None:
    data = load(str(image_folder(tmp_path / "pets", {"a": 5, "bb": 5})))
    assert data.mean == pytest.approx((data.x_train / 255).mean(axis=(0, 1, 2)))
    assert data.std == pytest.approx((data.x_train / 255).std(axis=(0, 1, 2)))


def test_grey_images_have_one_channel_and_mixed_ones_three(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pets", {"a": 3, "bb": 3}, mode="L")
    assert load(str(folder)).shape == (1, 4, 6)
    picture(0).save(folder / "a" / "colour.png")
    assert load(str(folder)).shape == (3, 4, 6)


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pets", {"a": 3, "bb": 3})
    picture(0, (9, 7)).save(folder / "a" / "large.png")
    with pytest.raises(UsageError) as caught:
        load(str(folder))
    assert str(caught.value) == f"{folder} has images of 2 sizes (6x4, 9x7): expected one; {folder}?size=4 resizes."
    assert load(f"{folder}?size=5").shape == (3, 5, 5)


def test_resized_images_are_interpolated(tmp_path: Path) -> None:
    """A chequerboard of 0 and 255 at half its size is grey."""
    board = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)
    for label in ("a", "b"):
        (tmp_path / "boards" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(board).save(tmp_path / "boards" / label / f"{i}.png")
    data = load(f"{tmp_path / 'boards'}?size=4")
    assert data.x_train.shape[1:] == (4, 4, 1)
    assert 100 < data.x_train.min() <= data.x_train.max() < 155


@pytest.mark.parametrize(
    ("query", "sentence"),
    [("size=0", "size='0'"), ("size=big", "size='big'"), ("sise=3", "did you mean 'size'")],
)
def test_an_invalid_option_says_what_is_expected(tmp_path: Path, query: str, sentence: str) -> None:
    folder = image_folder(tmp_path / "pets", {"a": 3, "bb": 3})
    with pytest.raises(UsageError) as caught:
        load(f"{folder}?{query}")
    assert sentence in str(caught.value)


def nothing(folder: Path) -> None:
    folder.mkdir()


def empty_class(folder: Path) -> None:
    image_folder(folder, {"a": 3, "bb": 0})


def one_class(folder: Path) -> None:
    image_folder(folder, {"a": 3})


def broken_image(folder: Path) -> None:
    image_folder(folder, {"a": 3, "bb": 3})
    raw = (folder / "a" / "1.png").read_bytes()
    (folder / "a" / "1.png").write_bytes(raw[:50])  # in the middle of its pixels


def deep_pixels(folder: Path) -> None:
    image_folder(folder, {"a": 3, "bb": 3})
    Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(folder / "a" / "scan.png")


def new_class(folder: Path) -> None:
    image_folder(folder / "train", {"a": 3, "bb": 3})
    image_folder(folder / "test", {"a": 3, "ccc": 3})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nothing, "expected one folder per class"),
        (empty_class, "bb has no images: expected"),
        (one_class, "all training samples are of one class, a"),
        (broken_image, "1.png cannot be used"),
        (deep_pixels, "scan.png cannot be used: its pixels are of mode I;16"),
        (new_class, "class 'ccc' is in the test part only"),
    ],
)
def test_an_invalid_folder_is_an_error_that_says_why(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    make(tmp_path / "pets")
    with pytest.raises(UsageError) as caught:
        load(str(tmp_path / "pets"))
    assert sentence in str(caught.value)


# The user's .npz files.


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})
    return str(path)


def test_vectors_of_any_shape_are_float32_and_not_normalised(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3, 5))
    data = load(save(tmp_path / "waves.npz", x_train=x, y_train=np.arange(20) % 4))
    assert (data.name, data.shape, data.classes, data.mean, data.labels) == ("waves", (3, 5), 4, (), ())
    assert data.x_train.dtype == np.float32
    assert len(data.x_test) == 4
    assert set(data.y_test) == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(20, 6, 7), (20, 6, 7, 1), (20, 1, 6, 7)])
def test_images_become_channels_last(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    y = np.arange(20) % 2
    data = load(save(tmp_path / "scans.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4]))
    assert data.shape == (1, 6, 7)
    assert np.array_equal(data.x_train, x.reshape(20, 6, 7, 1))
    assert np.array_equal(data.x_test, data.x_train[:4])
    assert data.mean == pytest.approx(((x / 255).mean(),))


def test_labels_may_be_text_or_any_integers(tmp_path: Path) -> None:
    x = np.zeros((6, 2))
    test = {"x_test": x[:2]}
    text = load(save(tmp_path / "a.npz", x_train=x, y_train=["well", "ill", "ill"] * 2, y_test=["ill", "well"], **test))
    assert (text.labels, text.y_test.tolist()) == (("ill", "well"), [0, 1])
    numbers = load(save(tmp_path / "b.npz", x_train=x, y_train=[30, 4, 4, 30, 4, 4], y_test=[4, 30], **test))
    assert (numbers.labels, numbers.y_test.tolist()) == (("4", "30"), [0, 1])


def test_owners_follow_their_samples(tmp_path: Path) -> None:
    x = np.arange(20.0)[:, None]
    data = load(save(tmp_path / "a.npz", x_train=x, y_train=np.arange(20) % 2, u_train=np.arange(20) // 4))
    assert np.array_equal(data.owners_train, data.x_train[:, 0] // 4)
    assert np.array_equal(data.owners_test, data.x_test[:, 0] // 4)


def test_owners_of_the_training_part_alone_cannot_be_pooled(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2)), [0, 1, 0, 1]
    data = load(save(tmp_path / "a.npz", x_train=x, y_train=y, u_train=y, x_test=x, y_test=y))
    with pytest.raises(UsageError, match="owners of its training samples only: expected"):
        data.pooled()


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (
            {"x_train": np.zeros((4, 2)), "y_train": [0.5, 1, 0, 1]},
            "y_train is float64 of shape (4,), expected integers or text",
        ),
        ({"x_train": np.full((4, 2), np.nan), "y_train": [0, 1, 0, 1]}, "missing or infinite"),
        (
            {"x_train": np.zeros(4), "y_train": [0, 1, 0, 1]},
            "x_train is float64 of shape (4,), expected numbers [n, ...]",
        ),
        ({"x_train": np.zeros((0, 4)), "y_train": np.zeros(0, int)}, "no training samples"),
        (
            {"x_train": np.zeros((4, 2)), "y_train": [0, 1, 0, 1], "u_train": [1]},
            "u_train has shape (1,), expected one entry",
        ),
        (
            {"x_train": np.zeros((4, 2)), "y_train": [0, 1, 0, 1], "x_test": np.zeros((1, 3)), "y_test": [0]},
            "test samples are float32 (3,), expected float32 (2,)",
        ),
        ({"x": np.zeros((4, 2)), "y": [0, 1, 0, 1]}, "it has x, y, expected x_train"),
    ],
)
def test_an_invalid_npz_is_an_error_that_says_why(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert path in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "data '' is invalid: expected the name of a data set, or a path"),
        ("nowhere/data", "nowhere/data does not exist"),
        ("nowhere.csv", "nowhere.csv does not exist"),
        ("notes.txt", "notes.txt is invalid as data: expected a folder of images, an .npz or a .csv"),
        ("a.npz?size=3", "unknown setting of a.npz 'size'"),
    ],
)
def test_a_path_without_usable_data_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("hello")
    save(Path("a.npz"), x_train=np.zeros((4, 2)), y_train=[0, 1, 0, 1])
    with pytest.raises(UsageError) as caught:
        load(text)
    assert sentence in str(caught.value)


def test_a_name_means_the_named_set_even_if_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "digits", {"a": 3, "bb": 3})
    assert load("digits").classes == 10
    assert load("./digits").labels == ("a", "bb")


# Tables.

ROWS = "age,site,flat,diagnosis\n" + "".join(
    f"{20 + i},{'north' if i % 3 else 'south'},7,{'ill' if i % 2 else 'well'}\n" for i in range(20)
)


KNOWN = "?label=diagnosis&owner=site"
NAMED = "name,y\n" + "".join(f"{chr(97 + i)},{i % 2}\n" for i in range(12))


def table(folder: Path, text: str = ROWS, query: str = "") -> str:
    (folder / "patients.csv").write_text(text)
    return f"{folder}/patients.csv{query}"


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    data = load(table(tmp_path, query="?label=diagnosis&owner=site"))
    assert (data.name, data.labels, data.shape) == ("patients", ("ill", "well"), (2,))
    assert (data.owners, data.columns) == (("north", "south"), (Column("age"), Column("flat")))
    assert (len(data.x_train), len(data.x_test)) == (16, 4)
    assert sorted(data.pooled().x_train[:, 0].tolist()) == list(range(20, 40))


def test_features_labels_and_owners_of_a_row_stay_together(tmp_path: Path) -> None:
    """Sorted by age, the labels and owners alternate as written."""
    data = load(table(tmp_path, query="?owner=site&label=diagnosis")).pooled()
    order = np.argsort(data.x_train[:, 0])
    assert [data.labels[y] for y in data.y_train[order]] == ["well", "ill"] * 10
    assert data.owners_train[order].tolist() == [0 if i % 3 else 1 for i in range(20)]  # north 0, south 1


def test_large_numbers_are_standardised_in_double_precision(tmp_path: Path) -> None:
    """Seconds since 1970 differ in their tenth digit, which float32 does not have."""
    text = "time,y\n" + "".join(f"{1_700_000_000 + i},{i % 2}\n" for i in range(20))
    data = load(table(tmp_path, text)).pooled()
    assert len(np.unique(data.x_train)) == 20


@pytest.mark.parametrize("name", ["label", "Target", "class", "y"])
def test_the_label_column_is_guessed_by_its_name(tmp_path: Path, name: str) -> None:
    rows = "".join(f"{'pq'[i % 2]};{i}\n" for i in range(8))
    assert load(table(tmp_path, f"\ufeff{name};age\n{rows}")).labels == ("p", "q")


def test_numeric_classes_are_ordered_by_value(tmp_path: Path) -> None:
    rows = "".join(f"{i},{(2, 10, 9)[i % 3]}\n" for i in range(12))
    assert load(table(tmp_path, f"x,y\n{rows}")).labels == ("2", "9", "10")


@pytest.mark.parametrize(
    ("text", "query", "sentence"),
    [
        (ROWS, "", "patients.csv?label=COLUMN' with one of its columns: age, site, flat, diagnosis."),
        (ROWS.replace("25,north,7", "25,,7"), KNOWN, "row 7 has no value in column 'site'"),
        (ROWS.replace("25,north,7,ill", "25,north,7,NA"), KNOWN, "row 7 has no value in column 'diagnosis'"),
        (ROWS.replace("25,north,7", "25,north"), KNOWN, "row 7 has 3 cells, expected 4"),
        (ROWS.replace("25,north,7", "inf,north,7"), KNOWN, "column 'age' has 'inf' in row 7: expected a number"),
        (ROWS.replace("25,north,7", "old,north,7"), KNOWN, "column 'age' has 'old' in row 7: expected a number"),
        (ROWS, f"{KNOWN}&categorical=aje", "did you mean 'age'"),
        (NAMED, "", "column 'name' has 12 different words in 12 rows, too many for categories"),
        (ROWS, "?label=diagnosys", "did you mean 'diagnosis'"),
        (ROWS, "?owner=sight", "did you mean 'site'"),
        (ROWS, "?lable=diagnosis", "did you mean 'label'"),
        (ROWS, "?label=age&owner=site", "column 'age' has 20 different values in 20 rows"),
        ("1,2\n3,4\n", "", "expected the names of the columns"),
        ("a,a\n3,4\n", "", "has 'a' twice"),
        ("a,b\n", "", "has no rows"),
        ("", "", "expected the names of the columns"),
        ("b\np\nq\np\nq\n", "?label=b", "no column beside 'b'"),
    ],
)
def test_an_invalid_table_is_an_error_that_says_why(tmp_path: Path, text: str, query: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(table(tmp_path, text, query))
    assert sentence in str(caught.value)


# Torch datasets.


class Items:
    """Map-style: a length and items by index."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


PIXELS = np.random.default_rng(0).integers(0, 256, (10, 6, 7, 3), np.uint8)
CHW = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "xs",
    [
        pytest.param(list(PIXELS), id="arrays"),
        pytest.param(list(CHW), id="uint8 tensors"),
        pytest.param(list(CHW.float() / 255), id="float tensors, as ToTensor makes them"),
        pytest.param([x.double().numpy() / 255 for x in CHW], id="double arrays"),
        pytest.param([Image.fromarray(x) for x in PIXELS], id="PIL images"),
    ],
)
def test_images_of_a_torch_dataset_become_bytes_channels_last(xs: list[Any]) -> None:
    train = Items([(x, torch.tensor(i % 2)) for i, x in enumerate(xs)])
    data = from_dataset(train, Items(train.items[:3]), name="mine")
    assert (data.name, data.shape, data.classes) == ("mine", (3, 6, 7), 2)
    assert data.x_train.dtype == np.uint8
    assert np.array_equal(data.x_train, PIXELS)
    assert np.array_equal(data.x_test, PIXELS[:3])
    assert data.y_train.tolist() == [0, 1] * 5
    assert data.mean == pytest.approx((PIXELS / 255).mean(axis=(0, 1, 2)))


def test_floats_that_are_not_whole_255ths_stay_bit_identical() -> None:
    xs = CHW.float() / 255
    xs[3, 0, 0, 0] += 1e-4
    data = from_dataset(Items([(x, i % 2) for i, x in enumerate(xs)]))
    assert data.x_train.dtype == np.float32
    assert data.shape == (3, 6, 7)
    assert sorted(map(bytes, data.pooled().x_train)) == sorted(bytes(x.numpy()) for x in xs)


def test_a_constant_channel_is_normalised_by_1() -> None:
    """The first channel is 0 and 255 in equal parts: mean and deviation 1/2. The second is 255: mean 1, deviation 0."""
    x = np.full((2, 3, 3, 2), 255, np.uint8)
    x[0, ..., 0] = 0
    assert moments(x) == (pytest.approx((0.5, 1.0)), pytest.approx((0.5, 1.0)))


def test_training_and_test_part_become_bytes_only_if_both_are_whole_255ths() -> None:
    train = Items([(x, i % 2) for i, x in enumerate(CHW.float() / 255)])
    data = from_dataset(train, Items([(x / 3, y) for x, y in train.items]))
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    assert np.array_equal(data.x_test, CHW.numpy().astype(np.float32) / np.float32(255) / np.float32(3))


def test_a_real_torch_dataset_of_vectors_loads() -> None:
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 5
    data = from_dataset(torch.utils.data.TensorDataset(x, y))
    assert (len(data.x_train), len(data.x_test), data.shape, data.classes) == (15, 5, (4,), 5)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "it has no length or no samples, expected a map-style data set of pairs"),
        ([np.zeros(3)] * 4, "sample 0 is a ndarray, expected a pair"),
        ([(np.zeros(3), 0, 0)] * 4, "sample 0 is 3 values, expected a pair"),
        ([(np.zeros(3), 0), (np.zeros(3), 1.2)], "the class of sample 1 is a float, expected an integer or text"),
        ([(np.zeros(3), 0), (np.zeros(4), 1)], "must have the same shape"),
        ([(None, 0), (None, 1)], ""),
    ],
)
def test_an_invalid_torch_dataset_is_an_error(items: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be used: .*{words}"):
        from_dataset(Items(items))


def test_what_is_no_dataset_at_all_is_an_error() -> None:
    for given in (None, (pair for pair in [(np.zeros(3), 0)])):
        with pytest.raises(UsageError, match="the train dataset cannot be used: it has no length"):
            from_dataset(given)
