"""Frozen features: they are the net's, samples keep their labels and owners, and a head trains on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedskew.core.settings import UsageError
from fedskew.data.sources.loading import load as load_data
from fedskew.experiment.config import Experiment
from fedskew.experiment.embed import embed
from fedskew.experiment.run import Run
from fedskew.experiment.use import load

pytestmark = pytest.mark.usefixtures("fedskew")  # an empty folder


@pytest.fixture
def trained() -> Path:
    list(Run(Experiment(rounds=2, model="mlp:hidden=16"), out="trained"))
    return Path("trained")


def test_the_head_on_its_features_gives_the_models_own_logits(trained: Path) -> None:
    data = load_data("digits")
    made = embed(data, str(trained))
    model = load(trained)
    assert made["x_train"].shape == (len(data.y_train), 16)
    with torch.no_grad():
        again = model.net.head(torch.from_numpy(made["x_test"]))
    torch.testing.assert_close(again, model.logits(data.x_test), atol=1e-5, rtol=1e-5)


def test_labels_and_owners_stay_with_their_samples() -> None:
    digits = load_data("digits")
    names = tuple("abcdefghij")
    data = replace(digits, labels=names, owners_train=np.arange(len(digits.y_train)) % 7)
    made = embed(data, "mlp:hidden=8")
    assert made["y_train"].tolist() == [names[y] for y in digits.y_train]
    assert made["u_train"].tolist() == data.owners_train.tolist()  # type: ignore[union-attr]
    assert "u_test" not in made


def test_the_seed_decides_a_net_by_name() -> None:
    data = load_data("digits")
    a, b, c = (embed(data, "mlp:hidden=8", seed=seed)["x_test"] for seed in (0, 0, 1))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_head_trains_on_the_file(fedskew: Any) -> None:
    said = fedskew("embed", "--data", "digits", "--model", "mlp:hidden=64", "--out", "f.npz", "--json")
    assert said.json()["features"] == 64
    result = fedskew("run", "--data", "f.npz", "--model", "linear", "--method", "fedncm", "--rounds", "1", "--json")
    assert result.json()["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--data", "heart", "--model", "mlp", "--out", "f.npz"], "is a table"),
        (["--data", "digits", "--model", "nothing", "--out", "f.npz"], "unknown net 'nothing'"),
        (["--data", "digits", "--model", "mlp", "--out", "f.txt"], "expected a file that ends with .npz"),
    ],
)
def test_mistakes_are_one_sentence(fedskew: Any, words: list[str], problem: str) -> None:
    said = fedskew("embed", *words)
    assert said.code == 2
    assert problem in said.err
    assert not list(Path().glob("f.*"))


def test_data_of_another_shape_are_refused(trained: Path) -> None:
    wide = replace(load_data("digits"), x_train=np.zeros((4, 9, 9, 1), np.uint8), y_train=np.zeros(4, np.int64))
    with pytest.raises(UsageError, match="expected images of 8x8 pixels"):
        embed(wide, str(trained))
