"""`fedskew check` finds planted faults, and passes methods that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedskew.core.tensors import Tensors
from fedskew.experiment.given import method_of
from fedskew.methods.fedavgm import FedAvgM
from fedskew.studies.laws import (
    changes_no_argument,
    check,
    hooks_return_payloads,
    it_learns,
    keeps_nothing_between_calls,
    randomness_follows_the_seed,
    rounds_to_come_do_not_matter,
    small_clients_work,
    terms_off_is_fedavg,
)
from fedskew.studies.sending_laws import (
    ignores_who_it_is,
    payloads_can_be_sent,
    sends_no_samples,
    server_needs_only_sums,
)
from fedskew.studies.subject import Subject, equal
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


@pytest.mark.parametrize(
    ("name", "law", "says"),
    [
        ("SeedsTorch", randomness_follows_the_seed, "the global generator of torch: use site.rng"),
        ("DrawsFromNumpy", randomness_follows_the_seed, "the global generator of numpy.random: use site.rng"),
        ("IgnoresTheSeed", randomness_follows_the_seed, "seeds a generator with 7 whatever the run's seed"),
        ("SendsDoubles", payloads_can_be_sent, "the update has body.1.weight as torch.float64 [32, 64], the net"),
        ("LastOneCounts", server_needs_only_sums, "depends on the order of the updates"),
        ("KeepsInItself", keeps_nothing_between_calls, "a run depends on what happened before it"),
        ("ForgetsTheState", hooks_return_payloads, "`client` returned Update, expected an Update and the state"),
        ("ReturnsNothing", hooks_return_payloads, "the result of `aggregate` is NoneType, expected a payload"),
        ("LeaksSamples", sends_no_samples, "extra/batch of an update contains samples of the client"),
        ("LeaksBytes", sends_no_samples, "extra/first of an update contains samples of the client"),
        ("LeaksLabels", sends_no_samples, "extra/y of an update contains labels of the client's samples"),
        ("ChangesTheData", changes_no_argument, "a hook changed the samples"),
        ("SetsTorch", changes_no_argument, "a hook changed torch's default type for the whole process"),
        (
            "NeedsTwoClasses",
            small_clients_work,
            "with clients of one class, all 3 clients of the round sent values that are not",
        ),
        ("WeighsByNumber", ignores_who_it_is, "an update depends on `site.client`"),
        ("CountsRounds", rounds_to_come_do_not_matter, "its first rounds are others if more rounds follow"),
        ("WalksAway", it_learns, "FedAvg's 85%, chance 10%"),
    ],
)
def test_a_fault_is_named_and_a_method_without_it_passes(name: str, law: Any, says: str) -> None:
    assert says in law(Subject(method_of(f"my.py:{name}")))
    assert law(Subject(method_of("my.py:Pull"))) == ""


def test_a_fixed_seed_may_be_a_setting() -> None:
    """FedMR's clients must agree on an order, drawn from its setting `share_seed`."""
    assert randomness_follows_the_seed(Subject(method_of("fedmr:proto_share=0.5"))) == ""


def test_what_a_method_declares_is_no_fault() -> None:
    """A method may count rounds if it says so, and FedMR's clients draw by a seed who of them sends prototypes."""
    assert rounds_to_come_do_not_matter(Subject(method_of("my.py:CountsRoundsAndSaysSo"))) is None
    assert ignores_who_it_is(Subject(method_of("fedmr:proto_share=0.5"))) is None


def test_settings_of_torch_are_put_back() -> None:
    changes_no_argument(Subject(method_of("my.py:SetsTorch")))
    assert torch.get_default_dtype() == torch.float32


def test_wrong_results_of_hooks_end_the_check() -> None:
    """Every other law would fail for the same reason, in words of Python's."""
    assert [bool(outcome.problem) for outcome in check(method_of("my.py:ReturnsNothing"))] == [False, True]


def test_payloads_are_equal_by_value_type_and_place() -> None:
    def payload(value: Any) -> Any:
        return {"g": Tensors(a=torch.tensor(value))}

    nan = float("nan")
    assert equal(payload([1.0, nan]), payload([1.0, nan]))
    assert not equal(payload([1.0, nan]), payload([nan, 1.0]))
    assert not equal(payload(1.0), payload(1))
    assert not equal(payload(1.0), payload(1.0001))
    assert equal(payload(1.0), payload(1.0001), tolerance=1e-3)


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
