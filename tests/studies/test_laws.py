"""`fedskew check` finds planted faults, and passes methods that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedskew.experiment.given import method_of
from fedskew.methods.fedavgm import FedAvgM
from fedskew.studies.laws import Subject, changes_no_argument, check, terms_off_is_fedavg
from helpers.own_code import MY

pytestmark = pytest.mark.usefixtures("quick_workers", "own_folder")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("Pull", set()),
        ("ChangesItsArguments", {"Hooks change none of their arguments"}),
        ("DrawsGlobally", {"Two runs with one seed give the same bits"}),
        ("Remembers", {"A federation that was used before gives what a fresh one gives"}),
        ("OffIsNotFedAvg", {"With the settings it declares as `terms_off` it is FedAvg bit for bit"}),
        ("Fails", {"It works with one client, with few, and with clients that never trained, and stays finite"}),
    ],
)
def test_check_finds_planted_faults(name: str, laws: set[str]) -> None:
    broken = {outcome.law for outcome in check(method_of(f"my.py:{name}")) if outcome.problem}
    assert laws <= broken
    assert bool(laws) == bool(broken)


def test_an_exception_of_the_method_is_its_problem_and_names_it() -> None:
    first = next(outcome for outcome in check(method_of("my.py:Fails")) if outcome.problem)
    assert "KeyError: 'prototypes'" in (first.problem or "")


def test_a_law_that_does_not_apply_is_neither_kept_nor_broken() -> None:
    assert terms_off_is_fedavg(Subject(method_of("fedyogi"))) is None
    assert terms_off_is_fedavg(Subject(FedAvgM())) == ""


def test_what_was_changed_is_named() -> None:
    problem = changes_no_argument(Subject(method_of("my.py:ChangesItsArguments")))
    assert problem.startswith("a hook changed the server's payload and the broadcast")


def test_the_command_ends_with_1_if_a_law_is_broken(fedskew: Any, own_folder: Path) -> None:
    (Path.cwd() / "my.py").write_text(MY)
    said = fedskew("check", "my.py:Fails", "--json")
    assert said.code == 1
    assert said.json()["broken"] > 0
    assert fedskew("check", "my.py:Gone").code == 2


@pytest.mark.slow
def test_a_method_of_a_file_runs_on_workers_and_resumes_to_the_same_bits(fedskew: Any) -> None:
    (Path.cwd() / "my.py").write_text(MY)
    words = ["run", "--method", "my.py:Pull:mu=0.3", "--model", "my.py:net:width=8", "--rounds", "2", "--json"]
    one, two = (fedskew(*words, "--workers", n, "--out", f"r{n}").json() for n in ("1", "2"))
    assert one["digest"] == two["digest"]
    settings = Path("r1/settings.toml").read_text()
    assert 'name = "my.py:Pull"' in settings
    assert fedskew("run", "--config", "r1/settings.toml", "--json", "--out", "r3").json()["digest"] == one["digest"]
