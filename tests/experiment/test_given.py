"""The Python API refuses what the command line refuses, with one sentence, and takes methods as text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from fedskew.core.settings import checked
from fedskew.experiment.given import method_of, method_text

SMALL = fedskew.Experiment(split="iid:clients=2", model="mlp:hidden=4", rounds=1)
X, Y = torch.zeros(20, 1, 8, 8), torch.arange(20) % 10


class TooFew(nn.Module):
    """Five outputs, for data of ten classes."""

    def __init__(self, outputs: int = 5, inputs: int = 64) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 6), nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)))  # type: ignore[no-any-return]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"rounds": 0}, "rounds=0 is invalid: expected a whole number of at least 1"),
    ({"rounds": 10**20}, "of at most 1000000"),
    ({"rounds": 2.5}, "rounds=2.5"),
    ({"rounds": "5"}, "rounds='5'"),
    ({"seed": -1}, "seed=-1"),
    ({"step": "slow"}, "expected one of fast, plain"),
    ({"training": fedskew.Training(lr=-1)}, "training: lr=-1 is invalid: expected a number above 0."),
    ({"training": fedskew.Training(lr=float("nan"))}, "lr=nan"),
    ({"training": fedskew.Training(epochs=0)}, "epochs=0 is invalid: expected a whole number of at least 1"),
    ({"training": fedskew.Training(optimiser="sgdd")}, "expected one of sgd, adam"),  # type: ignore[arg-type]
    ({"training": {"lr": 0.1}}, "expected a fedskew.Training"),
    ({"holdout": fedskew.Holdout(test=1.5)}, "test=1.5"),
    ({"evaluation": fedskew.Evaluation(every=0)}, "every=0"),
    ({"trouble": fedskew.Trouble(fault="nann")}, "did you mean 'nan'"),
    ({"method": fedskew.FedProx(mu=-5)}, "method fedprox: mu=-5 is invalid: expected a number of at least 0."),
    ({"method": fedskew.FedProx}, "method=FedProx is a class: expected a method, as in FedProx()."),
    ({"method": "fedprxo"}, "did you mean 'fedprox'"),
    ({"method": "fedprox:mu=-5"}, "mu='-5' is invalid"),
    ({"method": 7}, "expected a method"),
    ({"model": TooFew}, "model=TooFew is a class: expected a net, as in TooFew()."),
    ({"model": 3}, "expected the name of a net"),
    ({"data": (X, Y)}, "data is a tuple: expected a name, a path or a DataSet; fedskew.from_dataset"),
    ({"data": X}, "data is a Tensor"),
    ({"data": fedskew.DataSet("own", X, Y, X, Y, 10)}, "x_train is a Tensor: expected a numpy array"),  # type: ignore[arg-type]
    ({"split": 3}, "split=3"),
    ({"training": fedskew.Training(schedule=3)}, "training: schedule=3 is invalid"),  # type: ignore[arg-type]
    ({"training": fedskew.Training(augment=3)}, "training: augment=3 is invalid"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("given", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_in_python_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fedskew.UsageError) as caught:
        fedskew.run(replace(SMALL, **given))
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


VECTORS, CLASSES = np.zeros((20, 3), np.float32), np.arange(20) % 2
IMAGES = np.arange(20 * 64, dtype=np.uint8).reshape(20, 8, 8, 1)


def data_set(**changes: Any) -> fedskew.DataSet:
    plain = {"x_train": VECTORS, "y_train": CLASSES, "x_test": VECTORS, "y_test": CLASSES, "classes": 2}
    return fedskew.DataSet("own", **plain | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"x_train": VECTORS.astype(float)},
            "x_train is float64[20, 3]: expected images uint8 [n, h, w, c] or vectors",
        ),
        ({"x_train": VECTORS.astype(int)}, "x_train is int64[20, 3]"),
        ({"x_train": IMAGES[..., 0]}, "x_train is uint8[20, 8, 8]"),
        ({"x_train": VECTORS[:, 0]}, "x_train is float32[20]"),
        ({"y_train": CLASSES.astype(np.int32)}, "y_train is int32[20]: expected int64[20], one class per sample"),
        ({"y_train": CLASSES.astype(float)}, "y_train is float64[20]"),
        ({"y_test": CLASSES[:5]}, "y_test is int64[5]: expected int64[20], one class per sample of x_test"),
        ({"x_test": VECTORS[:, :2]}, "its test samples are float32[2], expected float32[3]"),
        ({"classes": "2"}, "classes='2' is invalid"),
        ({"labels": ("a",)}, "it has 1 labels, expected 2"),
        ({"owners_train": CLASSES[:4]}, "owners_train must have one entry per sample of x_train, which are 20"),
        ({"mean": (0.5,), "std": (0.5,)}, "it has 1 means and 1 stds, expected 0"),
        ({"x_train": VECTORS + np.float32("nan")}, "x_train has values that are missing or infinite"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(fedskew.UsageError) as caught:
        fedskew.run(replace(SMALL, data=data_set(**changes)))
    assert words in str(caught.value)


def test_images_of_a_data_set_made_in_python_are_normalised() -> None:
    """Half of the pixels are 0 and half are 255, so both moments are 0.5; given ones stay."""
    pixels = np.where(np.arange(20 * 64).reshape(20, 8, 8, 1) % 2, 255, 0).astype(np.uint8)
    run = fedskew.run(replace(SMALL, data=data_set(x_train=pixels, x_test=pixels)))
    assert (run.assembled.world.mean, run.assembled.world.std) == ((0.5,), (0.5,))
    assert len(list(run)) == 1
    given = data_set(x_train=pixels, x_test=pixels, mean=(0.1,), std=(0.2,))
    assert fedskew.run(replace(SMALL, data=given)).assembled.world.mean == (0.1,)


def test_vectors_of_large_numbers_are_trained_as_they_are_and_a_note_says_so() -> None:
    assert fedskew.run(replace(SMALL, data=data_set())).assembled.notes == ()
    (note,) = fedskew.run(replace(SMALL, data=data_set(x_train=VECTORS + 255))).assembled.notes
    assert note.startswith("the samples have numbers up to 255, which are not scaled")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers=0 is invalid: expected a number of processes of at least 1, or None."),
        ({"workers": -2}, "workers=-2"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"workers": True}, "workers=True"),
        ({"engine": "procesess"}, "did you mean 'processes'"),
        ({"device": "tpu"}, "device tpu is not available"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"engine": None}, "unknown engine 'None'"),
        ({"out": 3}, "out=3 is invalid: expected a path."),
        ({"out": ""}, "out='' is invalid: expected a path."),
        ({"data_dir": 3}, "data_dir=3 is invalid: expected a path."),
        ({"track": "tensorbord"}, "unknown tracker 'tensorbord'; did you mean 'tensorboard'"),
        ({"track": ["tensorbord"]}, "did you mean 'tensorboard'"),
    ],
)
def test_a_mistake_in_how_to_run_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fedskew.UsageError) as caught:
        fedskew.run(SMALL, **options)
    assert sentence in str(caught.value)


def test_run_takes_an_experiment_and_nothing_else() -> None:
    with pytest.raises(fedskew.UsageError, match="'fedavg' is not an experiment"):
        fedskew.run("fedavg")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (TooFew(), r"outputs of shape \(2, 5\) for 2 samples: expected \(2, 10\), one for each class"),
        (TooFew(10, inputs=32), "cannot take samples of digits, of shape 1x8x8: "),
    ],
)
def test_a_net_that_does_not_fit_the_data_is_refused_before_the_run(net: nn.Module, sentence: str) -> None:
    with pytest.raises(fedskew.UsageError, match=sentence):
        fedskew.run(replace(SMALL, model=net, head="head"))
    assert fedskew.run(replace(SMALL, model=TooFew(10), head="head"))


def test_a_method_may_be_given_as_text() -> None:
    assert fedskew.Experiment(method="fedavg").method == fedskew.FedAvg()  # type: ignore[arg-type]
    assert fedskew.Experiment(method="fedprox:mu=0.1").method == fedskew.FedProx(mu=0.1)  # type: ignore[arg-type]
    assert fedskew.Experiment(method="fedcrc:epochs=1-2-3").method == fedskew.FedCRC(epochs=(1, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["fedavg", "fedprox:mu=0.5", "fedcrc:epochs=1-2-3,tau=0.5"])
def test_a_method_s_text_is_read_back_as_the_same_method(text: str) -> None:
    assert method_of(method_text(method_of(text))) == method_of(text)


def test_numbers_of_numpy_become_python_s() -> None:
    experiment = replace(SMALL, rounds=np.int64(3), training=fedskew.Training(lr=np.float32(0.5)))
    assert type(experiment.rounds) is int
    assert type(experiment.training.lr) is float
    assert "rounds = 3" in experiment.to_toml()


def test_a_user_s_own_method_may_have_fields_that_are_no_plain_values() -> None:
    class Weird:
        pass

    @dataclass(frozen=True)
    class Own(fedskew.Method):
        weird: Weird = field(default_factory=Weird)

    own = Own()
    assert checked(own, "method Own") == own
    assert isinstance(replace(SMALL, method=Own()).method, Own)


def test_more_workers_than_cores_become_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.experiment.machine.cores", lambda: 2)
    run = fedskew.run(SMALL, workers=100)
    assert run.workers == 2
    assert run.notes == ["100 workers are more than the 2 cores of this machine: 2 are used"]
    assert (fedskew.run(SMALL, workers=2).workers, fedskew.run(SMALL, workers=2).notes) == (2, [])
    assert fedskew.run(SMALL, workers=None).workers is None


def test_a_run_says_what_it_is_and_how_far_it_is() -> None:
    run = fedskew.run(replace(SMALL, method="fedprox:mu=0.5", seed=4))
    assert repr(run) == "<Run of fedprox:mu=0.5 on digits, 1 rounds, seed 4: 0 of 1 rounds done>"
    list(run)
    assert repr(run) == "<Run of fedprox:mu=0.5 on digits, 1 rounds, seed 4: finished>"


def test_help_explains_every_setting() -> None:
    """`help(fedskew.Experiment)` shows docstrings, not comments."""
    for kind in (fedskew.Experiment, fedskew.Training, fedskew.Holdout, fedskew.Evaluation, fedskew.Trouble):
        assert kind.__doc__
        missing = [name for name in kind.__dataclass_fields__ if f"    {name}: " not in kind.__doc__]
        assert missing == []


def test_records_count_rounds_from_one_for_people() -> None:
    """`round` stays the index from 0 that hooks and seeds use; a line of records.jsonl holds both."""
    (record,) = fedskew.run(SMALL)
    assert (record.round, record.number) == (0, 1)
    assert list(record.as_dict().items())[:2] == [("number", 1), ("round", 0)]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fedskew.load(3), "run=3 is invalid: expected a path."),  # type: ignore[arg-type]
        (lambda: fedskew.resume(None), "path=None is invalid: expected a path."),  # type: ignore[arg-type]
        (lambda: fedskew.read_run(3), "path=3 is invalid: expected a path."),  # type: ignore[arg-type]
        (lambda: fedskew.load_data(3), "data 3 is invalid: expected the name of a data set, or a path"),  # type: ignore[arg-type]
        (lambda: fedskew.export(1, "a.pt"), "1 is no trained model: expected what fedskew.load"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(fedskew.UsageError) as caught:
        call()
    assert sentence in str(caught.value)


def test_a_run_that_was_left_is_not_begun_again_in_silence(tmp_path: Any) -> None:
    """In a notebook, a second loop over a run would carry out its first round twice."""
    run = fedskew.run(replace(SMALL, rounds=3), out=tmp_path / "run")
    for _ in run:
        break
    with pytest.raises(fedskew.UsageError, match="this run was left after 1 of 3 rounds: go on with"):
        list(run)
    again = fedskew.run(replace(SMALL, rounds=3), out=tmp_path / "run", resume=True)
    assert [record.number for record in again] == [2, 3]
    assert list(again) == []  # finished: nothing is left to do
    assert len(again.records) == 3


def test_another_default_type_of_torch_is_one_sentence() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(fedskew.UsageError, match=r"torch's default type is torch\.float64"):
            fedskew.run(SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
