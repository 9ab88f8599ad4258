"""The server's public set, from the split or the user's own; long tails as splits; figures by head, middle and tail."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedskew
from fedskew.cli.main import main
from fedskew.core.settings import UsageError
from fedskew.data.split.chain import make_partition
from fedskew.data.split.cuts import longtail_counts
from fedskew.data.split.skew import class_table
from fedskew.evaluation.scores import Score, by_third, thirds
from fedskew.evaluation.summary import summarise
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.methods.fedddc import FedDDC

SMALL = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=12", rounds=1, method=FedDDC(I=2, J=2))
DIGITS = fedskew.load_data("digits")
PAGE = Path(__file__).parents[2] / "docs" / "public.md"


def own_npz(folder: Path, name: str = "own.npz", **changes: Any) -> str:
    """A hundred digits of the test part, ten of each class, in a file."""
    chosen = np.concatenate([np.flatnonzero(DIGITS.y_test == c)[:10] for c in range(10)])
    np.savez(folder / name, **{"x_train": DIGITS.x_test[chosen], "y_train": DIGITS.y_test[chosen]} | changes)
    return str(folder / name)


# The user's own public set


def test_a_user_s_public_set_is_on_the_server_and_nowhere_else(tmp_path: Path) -> None:
    cut = assemble(replace(SMALL, split="public:per_class=5+" + SMALL.split))
    setting = assemble(replace(SMALL, public=own_npz(tmp_path)))
    world = setting.world
    assert len(cut.world.public) == 50
    assert len(world.public) == 100
    assert world.y[world.public].bincount().tolist() == [10] * 10
    partition = torch.cat([world.train.values, world.test.values])
    assert not set(world.public.tolist()) & set(partition.tolist())
    assert len(partition) == len(setting.data.y_train) == len(DIGITS.y_train)
    site = world.server_site(0, "train")
    assert (site.data.mean, site.data.std) == (DIGITS.mean, DIGITS.std)
    x, y = site.data.take(torch.arange(100))
    pixels = (x * torch.tensor(DIGITS.std) + torch.tensor(DIGITS.mean)) * 255
    wanted = {(int(c), image.tobytes()) for c, image in zip(DIGITS.y_test, DIGITS.x_test, strict=True)}
    found = pixels.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert {(int(c), image.tobytes()) for c, image in zip(y, found, strict=True)} <= wanted


def test_a_user_s_public_set_does_not_change_the_clients(tmp_path: Path) -> None:
    with_it, without = (
        assemble(replace(SMALL, method=fedskew.FedAvg(), public=p)).world for p in (own_npz(tmp_path), "")
    )
    assert torch.equal(with_it.train.values, without.train.values)
    assert torch.equal(with_it.test.values, without.test.values)


def test_a_public_set_may_be_a_data_set_in_memory_or_a_folder_of_images(tmp_path: Path) -> None:
    few = replace(DIGITS, name="few", x_train=DIGITS.x_test[:60], y_train=DIGITS.y_test[:60])
    few = replace(few, x_test=DIGITS.x_test[60:90], y_test=DIGITS.y_test[60:90])
    assert len(assemble(replace(SMALL, public=few)).world.public) == 90
    for i, c in enumerate(DIGITS.y_test[:100]):
        (tmp_path / str(c)).mkdir(exist_ok=True)
        Image.fromarray(DIGITS.x_test[i, :, :, 0]).save(tmp_path / str(c) / f"{i}.png")
    world = assemble(replace(SMALL, public=str(tmp_path))).world
    assert len(world.public) == 100
    assert world.y[world.public].bincount().tolist() == np.bincount(DIGITS.y_test[:100]).tolist()


def test_a_run_learns_from_a_user_s_public_set_and_can_be_resumed(tmp_path: Path) -> None:
    experiment = replace(SMALL, public=own_npz(tmp_path), rounds=2)
    run = fedskew.run(experiment, out=tmp_path / "run")
    list(run)
    assert from_dict(read_toml(tmp_path / "run" / "settings.toml")) == experiment
    other = fedskew.run(replace(experiment, public=own_npz(tmp_path, "other.npz", y_train=np.arange(100) % 10)))
    list(other)
    assert run.result.model_digest != other.result.model_digest
    again = fedskew.resume(tmp_path / "run")
    list(again)
    assert again.result.digest == run.result.digest


def test_settings_without_a_public_set_do_not_mention_it() -> None:
    assert "public" not in SMALL.as_dict()
    assert replace(SMALL, public=DIGITS).as_dict()["public"] == "digits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": DIGITS.x_test[:100, :6]}, "images of shape 1x6x8: expected images of shape 1x8x8"),
        ({"x_train": np.zeros((100, 64), np.float32)}, "vectors of shape 64: expected images of shape 1x8x8"),
        ({"x_train": DIGITS.x_test[:100].repeat(3, 3)}, "images of shape 3x8x8"),
        ({"y_train": np.arange(100) % 9}, r"9 classes \(0, 1, 2, 3, ...\): expected 10 classes"),
        ({"y_train": np.arange(100) % 10 + 1}, r"10 classes \(1, 2, 3, 4, ...\): expected 10 classes \(0, 1"),
        ({"y_train": np.array(list("abcdefghij") * 10)}, r"10 classes \(a, b, c, d, ...\)"),
    ],
)
def test_a_public_set_that_does_not_fit_is_an_error_that_says_how(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match="the public set own has " + words):
        assemble(replace(SMALL, public=own_npz(tmp_path, **changes)))


def test_class_names_of_a_public_set_must_be_those_of_the_clients() -> None:
    named = replace(DIGITS, name="named", labels=tuple("abcdefghij"))
    assemble(replace(SMALL, data=named, public=replace(named, name="same")))
    assemble(replace(SMALL, data=named, public=replace(DIGITS, name="numbers", labels=())))
    assemble(replace(SMALL, data=replace(DIGITS, labels=()), public=replace(DIGITS, name="zero to nine")))
    with pytest.raises(UsageError, match="classes"):
        assemble(replace(SMALL, data=named, public=replace(named, labels=tuple("abcdefghix"))))


def test_two_public_sets_none_or_the_clients_data_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"two public sets, own and the 50 samples.*: expected one; leave out"):
        assemble(replace(SMALL, split="public:per_class=5+" + SMALL.split, public=own_npz(tmp_path)))
    with pytest.raises(UsageError, match=r"needs public data.*public:per_class=20\+dirichlet.*public=\.\.\."):
        assemble(SMALL)
    with pytest.raises(UsageError, match=r"the same data set.*public:per_class"):
        assemble(replace(SMALL, public="digits"))
    with pytest.raises(UsageError, match="does not exist"):
        assemble(replace(SMALL, public="nowhere/own.npz"))


@pytest.mark.slow
def test_the_commands_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    fedskew ")]
    assert len(commands) == 3
    for command in commands:
        main(shlex.split(command)[1:])
    assert "public samples" in capsys.readouterr().out
    splits = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    longtail:")]
    assert len(splits) == 1
    make_partition(splits[0], np.repeat(np.arange(10), 5000), seed=0)


# Long tails


@pytest.mark.parametrize("factor", [10, 50, 100])
@pytest.mark.parametrize("partitioner", ["dirichlet:alpha={},clients=20", "grouped-equal:alpha={},clients=20"])
@pytest.mark.parametrize("alpha", ["0.1", "1", "10"])
def test_the_nine_settings_of_feddc_s_paper_can_be_partitioned(factor: int, partitioner: str, alpha: str) -> None:
    """CIFAR-10: a hundred of each class first, n_c = int(4900 IF^(-c/9)); by the text, or FEDIC's code."""
    y = np.repeat(np.arange(10), 5000)
    partition = make_partition(
        f"longtail:factor={factor},public=0.02+{partitioner.format(alpha)}", y, seed=0, classes=10
    )
    table = class_table(partition, y, 10)
    assert table.sum(0).tolist() == longtail_counts(4900, 10, factor)
    assert np.bincount(y[partition.public]).tolist() == [100] * 10
    assert len(table) == 20
    sizes = table.sum(1)
    assert sizes.max() - sizes.min() <= 1 if "grouped" in partitioner else sizes.min() >= 10


def test_the_long_tail_experiments_can_be_read_and_their_commands_name_methods() -> None:
    """The command in each file's head names only known methods and settings, and the file itself."""
    from fedskew.experiment.config import method_of

    folder = Path(__file__).parents[2] / "experiments"
    for name in ("fedddc-fmnist-lt", "fedddc-mnist-lt"):
        text = (folder / f"{name}.toml").read_text()
        head = [line.removeprefix("#").rstrip("\\").strip() for line in text.splitlines() if line.startswith("#")]
        start = next(i for i, line in enumerate(head) if line.startswith("fedskew compare"))
        end = next(i for i, line in enumerate(head) if "--config" in line)
        words = shlex.split(" ".join(head[start : end + 1]))
        methods = [method_of(word) for word in words[2 : words.index("--config")]]
        rows = [m for m in methods if isinstance(m, FedDDC)]
        assert words[words.index("--config") + 1] == f"experiments/{name}.toml"
        assert len(set(methods)) == len(methods) >= 15
        assert {(m.dfl, m.ec, m.led) for m in rows if m.lam < 1 and m.kd == "dkd"} == {
            ("none", False, False),
            ("both", False, False),
            ("none", True, False),
            ("both", True, False),
            ("both", False, True),
            ("none", True, True),
            ("both", True, True),
            ("tlcr", False, False),
            ("crb", False, False),
        }
        experiment = from_dict(read_toml(folder / f"{name}.toml"))
        assert (experiment.clients_per_round, experiment.trouble.dropout) == (8, 0.05)


# Head, middle, tail


def test_classes_fall_into_thirds_by_their_training_samples() -> None:
    """Ten classes: three, four, three; equal counts by number."""
    assert thirds([5, 100, 30, 40, 8, 60, 9, 90, 20, 7]) == {
        "head": [1, 5, 7],
        "middle": [2, 3, 6, 8],
        "tail": [0, 4, 9],
    }
    assert thirds([9, 9, 9, 1, 1, 1]) == {"head": [0, 1], "middle": [2, 3], "tail": [4, 5]}
    assert thirds([1, 4]) == {"head": [1], "middle": [], "tail": [0]}
    assert thirds([4, 0, 4]) == {"head": [0], "middle": [2], "tail": [1]}
    assert [len(part) for part in thirds(longtail_counts(490, 100, 10)).values()] == [33, 34, 33]


@pytest.mark.parametrize("counts", [[5, 5, 5], [100, 51, 60], [0, 0], [7]])
def test_where_no_class_has_twice_another_s_samples_there_is_no_tail(counts: list[int]) -> None:
    assert thirds(counts) == {}


def test_a_third_s_accuracy_is_over_its_samples() -> None:
    """Classes 0 and 2: (1 + 3) of (2 + 8); class 1 has no test sample."""
    score = Score((1, 0, 3), (2, 0, 8), 4.0)
    assert by_third(score, {"head": [0, 2], "middle": [], "tail": [1]}) == {"head": 0.4, "middle": None, "tail": None}
    metrics = summarise(score, [], frozenset(), False, {"head": [0, 2], "tail": [1]})
    assert metrics.groups == {"head": [0, 2], "tail": [1]}
    assert (metrics.global_.head, metrics.global_.tail) == (0.4, None)
    assert not summarise(score, [], frozenset(), False, {}).groups


def test_a_record_of_a_long_tail_has_the_classes_and_accuracies_of_head_middle_and_tail() -> None:
    split = "longtail:factor=10,public=0.1+iid:clients=3"
    experiment = replace(SMALL, split=split, method=FedDDC(led=False, I=2), rounds=1)
    (record,) = fedskew.run(experiment)
    assert record.metrics is not None
    assert record.metrics.groups == {"head": [0, 1, 2], "middle": [3, 4, 5, 6], "tail": [7, 8, 9]}
    counts = [int((DIGITS.y_test == c).sum()) for c in range(10)]
    for figures in (record.metrics.global_, record.metrics.ensemble):
        for part, classes in record.metrics.groups.items():
            right = sum(figures.per_class[c] * counts[c] for c in classes)
            assert getattr(figures, part) == pytest.approx(right / sum(counts[c] for c in classes))
    (even,) = fedskew.run(replace(experiment, split="public:per_class=5+iid:clients=3"))
    assert even.metrics is not None
    assert not even.metrics.groups
    assert even.metrics.global_.head is None


def test_a_comparison_shows_the_tail_and_the_ensemble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = "longtail:factor=10,public=0.1+iid:clients=3"
    methods = ["fedavg", "fedddc:led=false,I=2"]
    main(["compare", *methods, "--split", split, "--rounds", "1", "--workers", "1", "--out", str(tmp_path / "c")])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("head", "middle", "tail", "ensemble"))
    assert " new " not in next(line for line in shown.splitlines() if "┃" in line)
    settings = ["--set", "method.led=false", "--set", "method.I=2", "--split", split, "--rounds", "1"]
    main(["run", "--method", "fedddc", *settings, "--workers", "1", "--out", str(tmp_path / "r")])
    shown = capsys.readouterr().out
    assert "tail classes" in shown
    assert "ensemble at the server" in shown
