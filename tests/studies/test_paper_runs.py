"""The planned runs of the papers: commands, resuming, and that every claim's runs are planned."""

from pathlib import Path

import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.report import papers as page
from fedskew.studies.paper_runs import make_runs, read_plan
from fedskew.studies.papers import read_cells, read_claims

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/papers"


def write_plan(folder: Path, seeds: str = "[0, 1]") -> Path:
    (folder / "small.toml").write_text(Experiment(rounds=1, split="iid:clients=3", model="mlp:hidden=8").to_toml())
    path = folder / "plan.toml"
    path.write_text(
        f'[[runs]]\nname = "small-{{method}}-s{{seed}}"\nconfig = "{folder / "small.toml"}"\nseeds = {seeds}\n'
        'options = "--set training.lr=0.05"\n[runs.methods]\navg = "fedavg"\nprox = "fedprox:mu=1"\n'
    )
    return path


def test_a_plan_gives_each_run_its_command_seed_by_seed(tmp_path: Path) -> None:
    commands = read_plan(write_plan(tmp_path))
    assert list(commands) == ["small-avg-s0", "small-prox-s0", "small-avg-s1", "small-prox-s1"]
    config = tmp_path / "small.toml"
    assert commands["small-prox-s1"] == (
        f"fedskew run --config {config} --method fedprox:mu=1 --set training.lr=0.05 --seed 1 --workers 1"
    )


@pytest.mark.slow
def test_runs_are_made_once_kept_with_their_command_and_finished_ones_are_not_repeated(tmp_path: Path) -> None:
    plan, cells, said = write_plan(tmp_path, "[3]"), tmp_path / "cells", list[str]()
    assert make_runs(plan, cells, tmp_path / "out", words=["prox"], say=said.append) == ["small-prox-s3"]
    (cell,) = read_cells(cells).values()
    assert (cell.method, cell.seed, cell.command) == ("fedprox", 3, read_plan(plan)["small-prox-s3"])
    assert cell.settings["training"]["lr"] == 0.05
    assert said[-1].endswith(cell.digest[:16])
    assert make_runs(plan, cells, tmp_path / "out", words=["prox"], say=said.append) == []
    (cells / "small-prox-s3.json").unlink()  # stopped between the end of the run and keeping it: read, not run again
    before = (tmp_path / "out/small-prox-s3/result.json").stat().st_mtime_ns
    assert make_runs(plan, cells, tmp_path / "out", words=["prox"], say=said.append) == ["small-prox-s3"]
    assert (tmp_path / "out/small-prox-s3/result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_that_fails_ends_with_a_sentence_and_keeps_nothing(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("training.lr=0.05", "training.lr=-1"))
    with pytest.raises(UsageError, match="small-avg-s0 ended with exit code 2"):
        make_runs(plan, tmp_path / "cells", tmp_path / "out", say=lambda _: None)
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(("seeds", "seed"), "is not a plan of runs"), (("-s{seed}", ""), "has two runs called small-avg")],
)
def test_a_plan_that_is_wrong_is_refused(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace(*change))
    with pytest.raises(UsageError, match=sentence):
        read_plan(plan)


def test_a_word_that_no_run_has_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no run whose name holds nonesuch"):
        make_runs(write_plan(tmp_path), tmp_path, tmp_path, words=["nonesuch"])


def test_every_run_that_a_claim_names_is_planned_and_kept_ones_were_made_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    planned, kept = read_plan(RESULTS / "plan.toml"), read_cells(RESULTS / "cells")
    papers = read_claims(RESULTS / "claims.toml").values()
    claims = [claim for paper in papers for claim in paper.claims]
    named = {n for c in claims for group in (c.method, c.baseline, *c.controls.values()) for n in group}
    assert named <= planned.keys()
    assert {n for paper in papers for n in paper.curves} <= planned.keys()
    assert {name: cell.command for name, cell in kept.items()} == {name: planned[name] for name in kept}
    assert all(Path(command.split("--config ")[1].split()[0]).exists() for command in planned.values())


def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    write_plan(tmp_path)
    with pytest.raises(SystemExit):
        page.main(["run", "nonesuch"])
    assert "no run whose name holds nonesuch" in capsys.readouterr().err
