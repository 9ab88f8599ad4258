"""Augmentation: exact pixels, random numbers from the given generator only."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Generator, Tensor

from fedskew.core.augment import Augment, Crop, Flip, Rotate, crop, flip, parse_augment, rotate
from fedskew.core.settings import UsageError

DTYPES = [torch.uint8, torch.float32]


def images(b: int = 5, h: int = 6, w: int = 7, c: int = 3, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(1, 256, (b, h, w, c), generator=Generator().manual_seed(1)).to(dtype)


def augment(text: str) -> Augment:
    made = parse_augment(text)
    assert made is not None
    return made


@pytest.mark.parametrize("text", ["", "none", " none "])
def test_no_augment_is_none(text: str) -> None:
    assert parse_augment(text) is None


@pytest.mark.parametrize("mode", ["zero", "reflect"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_crop_without_padding_is_the_identity(mode: str, dtype: torch.dtype) -> None:
    x = images(dtype=dtype)
    assert torch.equal(augment(f"crop:pad=0,mode={mode}")(x, Generator()), x)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_crop_is_its_own_slice_of_the_padded_image(mode: str, dtype: torch.dtype) -> None:
    x, pad = images(b=25, dtype=dtype), 2
    top, left = torch.arange(25) // 5, torch.arange(25) % 5  # every corner from (0, 0) to (4, 4)
    padded = torch.nn.functional.pad(x.permute(0, 3, 1, 2).float(), (pad,) * 4, mode=mode).permute(0, 2, 3, 1)
    wanted = torch.stack([padded[i, i // 5 : i // 5 + 6, i % 5 : i % 5 + 7] for i in range(25)])
    assert torch.equal(crop(x, top, left, pad, mode.replace("constant", "zero")), wanted.to(dtype))


def test_a_crop_worked_by_hand() -> None:
    """[[1, 2], [3, 4]] padded by 1, cut at (0, 0): a zero row and column come in. Reflected, 4 stands for both."""
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).view(1, 2, 2, 1)
    corner = torch.zeros(1, dtype=torch.long)
    assert crop(x, corner, corner, 1).flatten().tolist() == [0, 0, 0, 1]
    assert crop(x, corner, corner, 1, "reflect").flatten().tolist() == [4, 3, 2, 1]


def test_random_crops_reach_every_place_and_no_other() -> None:
    """A single bright pixel in the middle moves by -1, 0 or 1 either way: nine places."""
    x = torch.zeros(500, 5, 5, 1, dtype=torch.uint8)
    x[:, 2, 2] = 9
    out = augment("crop:pad=1")(x, Generator().manual_seed(0))
    seen = {tuple(place) for place in out[..., 0].nonzero()[:, 1:].tolist()}
    assert seen == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}


def test_reflecting_further_than_the_image_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"pad=6.*mode=zero"):
        augment("crop:pad=6,mode=reflect")(images(), Generator())


def test_flip_mirrors_only_the_marked_images() -> None:
    x = images(b=3)
    out = flip(x, torch.tensor([True, False, True]))
    assert torch.equal(out[0], x[0].flip(1))
    assert torch.equal(out[1], x[1])
    assert torch.equal(out[2, :, 0], x[2, :, -1])


def test_flipping_every_image_twice_gives_it_back() -> None:
    x, always = images(), augment("flip:p=1")
    once = always(x, Generator())
    assert not torch.equal(once, x)
    assert torch.equal(always(once, Generator()), x)
    assert torch.equal(augment("flip:p=0")(x, Generator()), x)


def test_about_half_the_images_are_flipped() -> None:
    """400 draws at one half: mean 200, deviation 10."""
    x = torch.arange(2, dtype=torch.uint8).view(1, 1, 2, 1).repeat(400, 1, 1, 1)
    flipped = augment("flip")(x, Generator().manual_seed(3))[:, 0, 0, 0].sum()
    assert 150 < flipped < 250


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("size", [4, 5])
def test_a_quarter_turn_is_rot90(mode: str, size: int) -> None:
    x = images(b=4, h=size, w=size)
    turns = torch.tensor([0.0, 1.0, 2.0, -1.0]) * math.pi / 2
    out = rotate(x, turns, mode)
    for i, k in enumerate((0, 1, 2, -1)):
        assert torch.equal(out[i], torch.rot90(x[i], k, (0, 1)))


def test_half_a_turn_of_an_oblong_image_mirrors_both_axes() -> None:
    x = images(b=1, h=4, w=9, dtype=torch.float32)
    assert torch.equal(rotate(x, torch.tensor([math.pi])), x.flip(1, 2))


def test_rotation_keeps_shapes_of_oblong_images_and_fills_corners_with_zeros() -> None:
    """A quarter turn of 2 x 4: the middle 2 x 2 block turns in place, the sides come from outside."""
    x = torch.arange(1, 9, dtype=torch.uint8).view(1, 2, 4, 1)  # rows 1 2 3 4 and 5 6 7 8
    out = rotate(x, torch.tensor([math.pi / 2]))
    assert out[0, :, :, 0].tolist() == [[0, 3, 7, 0], [0, 2, 6, 0]]


def test_rotation_angles_stay_within_the_bound() -> None:
    """A pixel 50 from the centre, turned by at most 10 degrees, rises or falls by at most 50 sin 10 = 8.7."""
    x = torch.zeros(200, 101, 101, 1)
    x[:, 50, 100] = 1
    out = augment("rotate:degrees=10,mode=bilinear")(x, Generator().manual_seed(0))
    rows = out[..., 0].sum(2).argmax(1).float() - 50
    assert rows.abs().max() <= 9
    assert rows.max() > 4
    assert rows.min() < -4


@pytest.mark.parametrize(
    "text", ["crop", "crop:mode=reflect", "flip", "rotate", "rotate:mode=bilinear", "crop+flip+rotate"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_augment_depends_on_its_seed_alone_and_keeps_shape_and_type(text: str, dtype: torch.dtype) -> None:
    x = images(b=16, h=8, w=8, dtype=dtype)
    before, state = x.clone(), torch.random.get_rng_state()
    made = augment(text)
    one, two, other = (made(x, Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert (one.shape, one.dtype) == (x.shape, x.dtype)
    assert torch.equal(x, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_steps_run_in_the_order_written() -> None:
    x, rng = images(h=8, w=8), Generator()
    by_hand = Rotate(30)(Flip()(Crop(2)(x, rng.manual_seed(4)), rng), rng)
    assert torch.equal(augment("crop:pad=2+flip+rotate:degrees=30")(x, rng.manual_seed(4)), by_hand)


def test_an_augment_can_be_pickled() -> None:
    made = augment("crop:pad=4,mode=reflect+flip+rotate:degrees=15")
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("corp", "did you mean 'crop'"),
        ("crop:padd=4", "did you mean 'pad'"),
        ("crop:mode=mirror", "expected one of zero, reflect"),
        ("crop:pad=-1", "pad='-1'"),
        ("flip:p=2", "p='2'"),
        ("crop++flip", "empty part"),
    ],
)
def test_an_invalid_augment_says_what_is_expected(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_augment(text)
    assert sentence in str(caught.value)


def test_vectors_cannot_be_augmented() -> None:
    with pytest.raises(UsageError, match="expected images"):
        augment("flip")(torch.zeros(3, 10), Generator())
