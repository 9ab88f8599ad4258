"""Predictions beside known classes: figures that do not mislead, and classes that are not mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedskew.core.settings import UsageError
from fedskew.experiment.scored import class_numbers, scored
from fedskew.experiment.use import Predictions


def predictions(numbers: list[int], labels: tuple[str, ...]) -> Predictions:
    return Predictions(
        [labels[n] for n in numbers], np.array(numbers), np.eye(len(labels), dtype=np.float32)[numbers], labels
    )


def test_figures_of_predictions_are_worked_by_hand() -> None:
    """Four healthy of whom all are found, two sick of whom one is: recalls 1 and 1/2, F1 8/9 and 2/3."""
    score = scored(predictions([0, 0, 0, 0, 0, 1], ("healthy", "sick")), ["healthy"] * 4 + ["sick"] * 2)
    assert score is not None
    assert score.accuracy == 5 / 6
    assert score.balanced_accuracy == 0.75
    assert score.macro_f1 == pytest.approx((8 / 9 + 2 / 3) / 2)
    assert scored(predictions([0], ("a", "b")), None) is None


@pytest.mark.parametrize(
    ("given", "names", "numbers"),
    [
        (["b", "a"], ("a", "b"), [1, 0]),
        (["1", "0"], ("healthy", "sick"), [1, 0]),  # words may be given by number
        (["1", "2"], ("1", "2"), [0, 1]),  # a number that is a name is that name
        (["0", "1"], ("1", "2"), [None, 0]),  # and never a place in the list beside it
        (["1", "2"], ("1.0", "2.0"), [0, 1]),
        (["1", "sick"], ("healthy", "sick"), [None, 1]),
    ],
)
def test_classes_are_given_by_name_or_all_by_number(given: list[str], names: Any, numbers: list[int | None]) -> None:
    assert class_numbers(given, names) == numbers


def test_a_class_that_the_model_does_not_know_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="the data have the class '0', which the model does not know: expected 1, 2"):
        scored(predictions([0, 1], ("1", "2")), ["0", "1"])


def test_folders_that_are_no_classes_do_not_prevent_predictions() -> None:
    made = predictions([0, 1], ("cat", "dog"))
    assert scored(made, ["patient 1", "patient 2"], folders=True) is None
    with pytest.raises(UsageError, match="'patient 2'"):
        scored(made, ["cat", "patient 2"], folders=True)


def test_predict_does_not_call_a_model_good_that_says_one_class(fedskew: Any) -> None:
    """40 patients of whom one is sick, and a column that says nothing: accuracy alone would be 97.5 %."""
    rows = [f"{i * 7 % 11},{'sick' if i % 40 == 3 else 'healthy'}" for i in range(400)]
    Path("t.csv").write_text("\n".join(["x,label", *rows]))
    assert fedskew("run", "--data", "t.csv", "--split", "iid:clients=2", "--rounds", "1", "--out", "r").code == 0
    said = fedskew("predict", "r", "--data", "t.csv?label=label")
    assert "balanced accuracy 50.00 %, macro F1 49.37 %, accuracy 97.50 %" in said.out
    assert "warning: the global model recognised no sample of class 'sick' (0 of 10)" in said.out
    found = fedskew("predict", "r", "--data", "t.csv?label=label", "--json").json()
    assert (found["accuracy"], found["balanced_accuracy"]) == (0.975, 0.5)
    assert len(found["warnings"]) == 3  # and that these are the samples it was trained on
    note = "note: these are the data of the run: the model was trained on most of the samples"
    assert note in said.out
    Path("new.csv").write_text(Path("t.csv").read_text())
    assert note not in fedskew("predict", "r", "--data", "new.csv?label=label").out


def test_an_image_of_16_bits_is_not_predicted_as_one_of_8(fedskew: Any) -> None:
    for kind, level in (("dark", 40), ("light", 200)):
        Path("images", kind).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (8, 8), level + i).save(f"images/{kind}/{i}.png")
    words = ["--data", "images", "--split", "iid:clients=2", "--model", "mlp:hidden=4", "--rounds", "1"]
    assert fedskew("run", *words, "--out", "r").code == 0
    Path("new").mkdir()
    Image.fromarray(np.full((8, 8), 40 * 256, np.uint16)).save("new/a.png")
    said = fedskew("predict", "r", "--data", "new")
    assert said.code == 2
    assert "a.png cannot be used: its pixels are of mode I;16, expected 8 bits per channel" in said.err
