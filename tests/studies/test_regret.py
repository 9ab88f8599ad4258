"""Regret: how far the advised method is below the best one on a task that the advice had no evidence of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment
from fedskew.studies import regret
from fedskew.studies.board.evidence import Row, Task
from fedskew.studies.regret import all_regrets, exhaustive_rounds, read_experiments, regret_of, table

VALUES = {"fedavg": 0.80, "fedprox": 0.82, "scaffold": 0.90, "central": 0.99, "feddyn": None}


def task(name: str, goal: str = "global", **changed: float | None) -> Task:
    values = VALUES | changed
    rows = [
        Row(method=m, lr=0.1, seeds=3, value=v, over=None if v is None else v - (values["fedavg"] or 0))
        for m, v in values.items()
    ]
    return Task(name=name, title=name, goal=goal, skew={}, commit="c", cpu="", rows=rows)


class Adviser:
    """Advice that was made up; keeps what it was asked."""

    def __init__(self, choice: str) -> None:
        self.choice, self.asked = choice, dict[str, Any]()

    def __call__(self, experiment: Experiment, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(choice=self.choice, certain=self.choice != "fedavg", sentence=f"Use {self.choice}.")


def test_regret_is_the_gap_to_the_best_federated_method_with_a_tenth_of_the_boards_rounds() -> None:
    """Five methods, three learning rates and three seeds each: 30 runs of 10 rounds; a tenth is 30 rounds."""
    adviser, left, other = Adviser("fedprox"), task("t1"), task("t2", fedprox=0.95)
    found = regret_of(left, [other], Experiment(rounds=10), adviser=adviser)
    assert exhaustive_rounds(left, 10) == 300
    assert found.budget == adviser.asked["budget_rounds"] == 30
    assert [t.name for t in adviser.asked["evidence"]] == ["t2"]  # the task itself is left out
    assert adviser.asked["goal"] == "global"
    assert (found.best, found.best_value) == ("scaffold", 0.90)  # central is a control
    assert found.regret == pytest.approx(0.08)
    assert found.always_fedavg == pytest.approx(0.10)
    assert (found.best_elsewhere, found.elsewhere) == ("fedprox", pytest.approx(0.08))


def test_a_choice_with_other_settings_counts_as_its_method_and_an_unknown_one_has_no_regret() -> None:
    given = (task("t1"), [], Experiment(rounds=10))
    assert regret_of(*given, adviser=Adviser("scaffold:server_lr=0.3")).regret == 0
    assert regret_of(*given, adviser=Adviser("fedmr")).regret is None
    assert regret_of(*given, adviser=Adviser("feddyn")).regret is None  # it diverged on the board


def test_where_lower_is_better_the_lowest_is_the_best() -> None:
    found = regret_of(task("t1", "personal_loss"), [], Experiment(rounds=1), adviser=Adviser("scaffold"))
    assert (found.best, found.regret) == ("fedavg", pytest.approx(0.1))


def test_a_task_without_fedavg_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        regret_of(task("t1", fedavg=None), [], Experiment(), adviser=Adviser("fedprox"))


def test_the_table_has_a_line_a_task_and_the_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: Sequence[Task] = [task("t1"), task("t2", scaffold=0.7), task("t3")]
    experiments = {"t1": Experiment(rounds=2), "t2": Experiment(rounds=2)}
    found = all_regrets(tasks, experiments, tmp_path, 0.1, adviser=Adviser("scaffold"))
    assert [one.task for one in found] == ["t1", "t2"]
    lines = table(found).splitlines()
    assert lines[2].startswith("| t1 | t2, t3 | scaffold | yes | scaffold 90.00 | 0.00 | 10.00 |")
    assert lines[3].startswith("| t2 | t1, t3 | scaffold | yes | fedprox 82.00 | 12.00 | 2.00 |")
    assert lines[4].startswith("| mean |  |  |  |  | 6.00 | 6.00 |")
    assert len(msgspec.json.decode((tmp_path / "regret.json").read_bytes())) == 2
    with pytest.raises(UsageError, match="nothing to leave out"):
        all_regrets(tasks, {}, tmp_path, 0.1)


def test_only_tasks_whose_evidence_is_new_are_asked_again(tmp_path: Path) -> None:
    """t1 and t2 are known; t3 joins: the advice on t1 and t2 now knows more, so all three are asked."""
    tasks, experiments = [task("t1"), task("t2")], {name: Experiment(rounds=2) for name in ("t1", "t2", "t3")}
    results, folders = tmp_path / "kept.json", list[str]()

    class Counted(Adviser):
        def __call__(self, experiment: Experiment, **asked: Any) -> Any:
            folders.append(asked["out"].name)
            return super().__call__(experiment, **asked)

    adviser = Counted("scaffold")
    first = all_regrets(tasks, experiments, tmp_path, 0.1, results, adviser=adviser)
    assert all_regrets(tasks, experiments, tmp_path, 0.1, results, adviser=adviser) == first
    assert len(folders) == 2
    grown = all_regrets([*tasks, task("t3")], experiments, tmp_path, 0.1, results, adviser=adviser)
    assert [list(one.evidence) for one in grown] == [["t2", "t3"], ["t1", "t3"], ["t1", "t2"]]
    assert len(set(folders)) == 5  # a race with other evidence has its own folder
    one = {"t1": experiments["t1"]}
    assert len(all_regrets([*tasks, task("t3")], one, tmp_path, 0.2, results, adviser=adviser)) == 3  # the others stay
    results.write_text("{}")
    with pytest.raises(UsageError, match="is no file of regrets"):
        all_regrets(tasks, experiments, tmp_path, 0.1, results, adviser=adviser)


def test_the_table_is_put_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{regret.MARKS[0]}\nold\n{regret.MARKS[1]}\nend\n")
    regret.put_table(page, "new")
    assert page.read_text() == f"# Title\n{regret.MARKS[0]}\nnew\n{regret.MARKS[1]}\nend\n"
    page.write_text("# Title\n")
    with pytest.raises(UsageError, match="no place for the table"):
        regret.put_table(page, "new")


def test_the_docs_show_the_table_that_is_kept() -> None:
    root = Path(__file__).parents[2]
    kept = regret.read_regrets(root / "results" / "advise" / "regret.json")
    page = (root / "docs" / "advise.md").read_text()
    assert all(mark in page for mark in regret.MARKS)
    assert not kept or table(kept) in page


def test_experiments_are_read_from_the_tasks_files(tmp_path: Path) -> None:
    (tmp_path / "t1.toml").write_text('title = "x"\nrates = [0.03, 0.1, 0.3]\n[experiment]\nrounds = 7\n')
    found = read_experiments(tmp_path)["t1"]
    assert (found.rounds, found.training.lr) == (7, 0.1)


@pytest.mark.slow
def test_the_script_runs_on_made_up_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("tasks", "evidence"):
        (tmp_path / folder).mkdir()
    for name in ("t1", "t2"):
        (tmp_path / "evidence" / f"{name}.json").write_bytes(msgspec.json.encode(task(name)))
    toml = '[experiment]\nrounds = 1\nmodel = "mlp:hidden=4"\nsplit = "sample:keep=100+iid:clients=2"\n'
    (tmp_path / "tasks" / "t1.toml").write_text(toml)
    given = ["--tasks", f"{tmp_path}/tasks", "--evidence", f"{tmp_path}/evidence", "--out", f"{tmp_path}/out"]
    assert regret.main([*given, "--share", "0.5", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "No method has learned these data" in said  # in a round
    assert "| t1 | t2 | fedavg | no | scaffold 90.00 | 10.00 | 10.00 |" in said
