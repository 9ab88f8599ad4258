"""The record of noisy sums, from which epsilon is computed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import tensor, zeros

from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run import Run
from fedskew.federation.accounting import spent, spent_on
from fedskew.federation.ledger import FILE, Ledger
from fedskew.federation.private import Plan, Privacy, private_updates

pytest.importorskip("dp_accounting")


def test_a_sum_counts_again_only_if_its_bits_differ(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / FILE)
    for round, value in ((0, 1.0), (1, 2.0), (1, 2.0), (1, 3.0)):
        ledger.record(round, 0.5, tensor([value]))
    again = Ledger(tmp_path / FILE)
    again.record(1, 0.5, tensor([3.0]))
    assert again.counted() == ledger.counted() == ((0.5, 3),)


def test_a_sum_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x: Payload = {"parameters": Tensors(w=zeros(2))}
    plan = Plan(1.0, 1.0, 1e-5, 2, 2, None, Ledger(tmp_path / FILE))
    private_updates([Update(x, 1.0)], x, plan, zeros, 7)
    assert [release.round for release in Ledger(tmp_path / FILE).releases] == [7]

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        private_updates([Update(x, 1.0)], x, plan, lambda n: zeros(n) + 1, 8)


def test_a_line_that_was_not_finished_was_not_used_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / FILE
    Ledger(path).record(0, 0.5, tensor([1.0]))
    with path.open("ab") as file:
        file.write(b'{"round": 1, "noi')
    ledger = Ledger(path)
    ledger.record(1, 0.5, tensor([2.0]))
    assert [release.round for release in Ledger(path).releases] == [0, 1]
    path.write_bytes(b"{\n" + path.read_bytes())
    with pytest.raises(UsageError, match="is damaged, so that the epsilon"):
        Ledger(path)


def test_rounds_of_an_earlier_version_are_counted(tmp_path: Path) -> None:
    """Three rounds are done, of which one is in the ledger."""
    ledger = Ledger(tmp_path / FILE)
    ledger.record(1, 0.5, tensor([1.0]))
    plan = Privacy(noise=0.5).plan(4, 9, 9, None, ledger, done=3)
    assert plan is not None
    assert Ledger(tmp_path / FILE).counted() == ((0.5, 3),)
    assert plan.epsilon(1) == spent(0.5, 4, 9, 9, 1e-5)


def test_noise_that_differs_is_composed() -> None:
    """Two Gaussians of noise a and b are as one of 1 / sqrt(1/a^2 + 1/b^2): 3 and 4 give 12 / 5."""
    assert spent_on(((3.0, 1), (4.0, 1)), 9, 9, 1e-5) == pytest.approx(spent(2.4, 1, 9, 9, 1e-5), rel=1e-6)


def test_a_repeated_round_raises_the_noise_of_the_rest_so_that_the_budget_is_kept() -> None:
    privacy = Privacy(epsilon=8.0)
    first = privacy.plan(10, 100, 100, None)
    assert first is not None
    ledger = Ledger()
    for value in range(5):
        ledger.record(value, first.noise, tensor([float(value)]))
    same = privacy.plan(10, 100, 100, None, ledger, done=5)
    repeated = privacy.plan(10, 100, 100, None, ledger, done=4)
    assert same is not None
    assert repeated is not None
    assert same.noise == first.noise < repeated.noise
    assert 7.99 < repeated.epsilon(6) <= 8 < replace(repeated, noise=first.noise).epsilon(6)


def test_a_budget_that_repeated_rounds_used_up_ends_the_run() -> None:
    ledger = Ledger()
    for value in range(30):
        ledger.record(value % 9, 1.0, tensor([float(value)]))
    with pytest.raises(UsageError, match="in 1 rounds after 30 noisy sums that were released"):
        Privacy(epsilon=8.0).plan(10, 100, 100, None, ledger, done=9)


def experiment(rounds: int = 3, **privacy: float) -> Experiment:
    values: dict[str, Any] = {"split": "sample:keep=200+iid:clients=4", "model": "mlp:hidden=8", "rounds": rounds}
    return from_dict(values | {"privacy": privacy or {"noise": 0.5}})


def test_a_simulation_that_repeats_a_round_releases_nothing_new(tmp_path: Path) -> None:
    """Its noise follows from the seed: the repeated round has the same bits, and epsilon is that of three rounds."""
    whole = Run(experiment(), out=tmp_path / "whole", checkpoint_every=1)
    list(whole)
    broken = Run(experiment(), out=tmp_path / "broken", checkpoint_every=1)
    steps = iter(broken)
    next(steps), next(steps)
    assert broken.directory is not None
    broken.directory.close()
    newest = broken.directory.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    again = Run(experiment(), out=tmp_path / "broken", checkpoint_every=1, resume=True)
    assert [record.round for record in again] == [1, 2]
    assert whole.result is not None
    assert again.result is not None
    assert again.result.digest == whole.result.digest
    assert again.result.epsilon == whole.result.epsilon == spent(0.5, 3, 4, 4, 1e-5)


@pytest.mark.parametrize("budget", [True, False])
def test_rounds_may_be_added_to_a_run_with_noise_but_not_to_a_budget(budget: bool, tmp_path: Path) -> None:
    """A budget fixes the noise for the planned rounds; more rounds would overspend it."""
    privacy = {"epsilon": 20.0} if budget else {"noise": 0.5}
    first = Run(experiment(2, **privacy), out=tmp_path, checkpoint_every=1)
    list(first)
    assert first.directory is not None
    first.directory.close()
    if budget:
        with pytest.raises(UsageError, match="2 rounds use up"):
            Run(experiment(3, **privacy), out=tmp_path, checkpoint_every=1, resume=True)
        return
    again = Run(experiment(3, **privacy), out=tmp_path, checkpoint_every=1, resume=True)
    assert [record.epsilon for record in again] == [spent(0.5, 3, 4, 4, 1e-5)]
