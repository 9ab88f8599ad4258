"""What becomes of a run that diverges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run import Run, resume
from fedskew.experiment.run_directory import read_run
from fedskew.federation.protocol import Diverged
from fedskew.methods import REGISTRY
from fedskew.studies.choice import choose_rate
from fedskew.studies.compare import Compared, summarise
from fedskew.studies.execution import execute

WILD = Training(lr=1e30, batch_size=32)  # the first step sends the weights beyond what float32 holds
SMALL = Experiment(split="iid:clients=3", model="mlp:hidden=8", rounds=8)


@dataclass(frozen=True)
class Collapse(Method):
    """FedAvg whose server forgets everything in round 2: all predictions are the first class from there on."""

    def aggregate(self, site: Any, server: Any, updates: Any) -> Any:
        made = super().aggregate(site, server, updates)
        if site.round < 2:
            return made
        zeros = {name: torch.zeros_like(t) for name, t in made["parameters"].items()}
        return made | {"parameters": type(made["parameters"])(zeros)}

    def client(self, site: Any, broadcast: Any, state: Any) -> Any:
        frozen = replace(site.training, epochs=0) if site.round >= 2 else site.training
        return super().client(replace(site, training=frozen), broadcast, state)


def test_a_run_that_falls_to_chance_stops_keeps_its_records_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two good rounds, then five at chance: it ends after seven of eight."""
    monkeypatch.setitem(REGISTRY, "collapse", Collapse)
    run = Run(replace(SMALL, method=Collapse()), out=tmp_path / "a")
    records = list(run)
    assert [r.round for r in records] == list(range(7))
    assert run.result is not None
    assert run.result.rounds == 7
    assert run.result.diverged == records[-1].diverged == run.diverged
    assert run.diverged.startswith("the run diverged in round 3: its accuracy is")
    saved = read_run(tmp_path / "a")
    assert saved.result == run.result
    assert saved.records[-1].diverged == run.diverged
    assert [r.diverged for r in saved.records[:-1]] == [""] * 6


def test_with_warn_it_goes_on_and_says_so_once() -> None:
    run = Run(replace(SMALL, method=Collapse(), on_divergence="warn", rounds=9))
    records = list(run)
    assert len(records) == 9
    assert [bool(r.diverged) for r in records] == [False] * 6 + [True] + [False] * 2
    assert run.result is not None
    assert run.result.diverged


def test_a_stopped_run_is_not_continued_by_resuming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "collapse", Collapse)
    first = Run(replace(SMALL, rounds=20, method=Collapse()), out=tmp_path / "a")
    list(first)
    assert first.result is not None
    assert first.result.rounds == 7
    again = resume(tmp_path / "a")
    assert list(again) == []
    assert again.result == first.result
    assert again.diverged == first.diverged


def test_updates_that_are_not_finite_from_all_clients_end_the_run_as_diverged(tmp_path: Path) -> None:
    """The first round without a finite update has no record; the server's model is the one before."""

    @dataclass(frozen=True)
    class Burst(Method):
        def client(self, site: Any, broadcast: Any, state: Any) -> Any:
            update, state = super().client(site, broadcast, state)
            if site.round == 2:
                for t in update.payload["parameters"].values():
                    t.fill_(float("nan"))
            return update, state

    run = Run(replace(SMALL, method=Burst()), out=tmp_path / "a")
    assert len(list(run)) == 2
    assert run.result is not None
    assert run.result.diverged == (
        "the run diverged in round 3: all 3 clients of the round sent values that are not finite"
    )
    assert (tmp_path / "a" / "model.safetensors").exists()


def test_a_run_that_diverges_in_its_first_round_has_no_result() -> None:
    with pytest.raises(Diverged, match="all 3 clients of the round sent values that are not finite"):
        list(Run(replace(SMALL, training=WILD)))


def test_a_study_counts_a_diverged_run_as_failed_and_says_so(tmp_path: Path) -> None:
    experiment = replace(SMALL, method=Collapse())
    for outcome in (execute(experiment, None), execute(replace(SMALL, training=WILD), None)):
        assert "diverged" in outcome.failed or "not finite" in outcome.failed
        line = summarise([Compared("x", 0, outcome)], None)[0]
        assert (line.seeds, line.failed, line.figures["global"].mean) == (0, 1, None)
    assert execute(replace(experiment, on_divergence="warn"), None).failed == ""


def test_a_diverged_run_read_from_its_directory_still_counts_as_failed(tmp_path: Path) -> None:
    experiment = replace(SMALL, training=Training(lr=1e18))
    first = execute(experiment, tmp_path / "a")
    assert first.failed
    assert execute(experiment, tmp_path / "a").failed == first.failed


def test_no_learning_rate_is_chosen_that_diverges(tmp_path: Path) -> None:
    assert choose_rate(replace(SMALL, rounds=2), [1e18, 0.1], tmp_path) == 0.1
    with pytest.raises(UsageError, match="diverged with each of the learning rates"):
        choose_rate(replace(SMALL, rounds=2), [1e18, 1e20], tmp_path / "b")


def test_the_setting_has_a_toml_form_and_its_default_is_left_out() -> None:
    assert "on_divergence" not in SMALL.to_toml()
    warn = replace(SMALL, on_divergence="warn")
    assert from_dict(warn.as_dict()) == warn
    with pytest.raises(UsageError, match="on_divergence"):
        from_dict({"on_divergence": "ignore"})
