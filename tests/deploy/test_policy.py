"""What a site refuses, and what it keeps to itself: `fedskew join --policy site.toml`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fedskew.core.settings import UsageError
from fedskew.deploy.policy import Policy, Refusal, join_policy, read_policy
from fedskew.experiment.config import Experiment, from_dict
from fedskew.federation.protocol import QuorumLost
from sites import nodes_in, served


def experiment(method: str = "fedavg", **more: Any) -> Experiment:
    values = {
        "method": method,
        "split": "iid:clients=3",
        "model": "mlp:hidden=8",
        "rounds": 2,
        "trouble": {"quorum": 2},
    }
    return from_dict(values | more)


def run(folder: Path, policy: Policy, what: Experiment) -> tuple[Any, list[str]]:
    """A run between three sites of which the first has the policy; and what the server's operator read."""
    said: list[str] = []
    nodes = [nodes_in(folder, policy=policy)[0], *nodes_in(folder)[1:]]
    between, _ = served(what, folder, nodes=nodes, said=said)
    list(between)
    return between, said


def test_a_group_that_may_not_leave_is_refused_politely_and_the_others_go_on(tmp_path: Path) -> None:
    policy = Policy(methods=frozenset({"fedmr"}), groups=frozenset({"parameters"}))
    between, _ = run(tmp_path, policy, experiment("fedmr"))
    assert [r.trained for r in between.records] == [[1, 2], [1, 2]]
    assert between.records[0].lost[0] == (
        "cannot take part: updates have prototypes; from this site only parameters leave"
    )
    assert len(list((tmp_path / "north").glob("**/*.safetensors"))) == 0


def test_groups_that_may_leave_do(tmp_path: Path) -> None:
    policy = Policy(methods=frozenset({"fedmr"}), groups=frozenset({"parameters", "prototypes"}))
    between, _ = run(tmp_path, policy, experiment("fedmr"))
    assert [r.lost for r in between.records] == [{}, {}]


def test_between_sites_class_statistics_need_five_samples_unless_given(tmp_path: Path) -> None:
    between, _ = served(experiment("fedmr"), tmp_path)
    assert between.experiment.privacy.min_count == 5
    between.close()
    given, _ = served(experiment("fedmr", privacy={"min_count": 2}), tmp_path / "other")
    assert given.experiment.privacy.min_count == 2
    given.close()


def test_an_experiment_with_a_smaller_min_count_is_refused(tmp_path: Path) -> None:
    what = experiment("fedmr", privacy={"min_count": 2})
    between, said = run(tmp_path, Policy(min_count=3), what)
    assert [r.trained for r in between.records] == [[1, 2], [1, 2]]
    assert any("privacy.min_count=2 is less than the 3 that this site requires" in line for line in said)


def test_a_limit_may_be_reached_and_not_passed() -> None:
    policy = Policy(rounds=2, epochs=3)
    policy.check(experiment(rounds=2, training={"epochs": 3}))
    with pytest.raises(Refusal, match="rounds=3 is more than the 2 that this site allows"):
        policy.check(experiment(rounds=3))
    with pytest.raises(Refusal, match=r"training.epochs=4 is more than the 3"):
        policy.check(experiment(training={"epochs": 4}))


def test_figures_and_counts_stay_where_the_policy_keeps_them(tmp_path: Path) -> None:
    """The site's loss and its test counts are missing from the server's means; those of the others are there."""
    quiet = Policy(metrics=frozenset(), counts=False)
    between, _ = run(tmp_path, quiet, experiment())
    (tmp_path / "all").mkdir()
    usual, _ = run(tmp_path / "all", Policy(), experiment())
    assert between.result.digest == usual.result.digest
    assert sorted(between.result.clients) == ["1", "2"]
    assert sorted(usual.result.clients) == ["0", "1", "2"]
    assert between.records[0].training["loss"] != usual.records[0].training["loss"]
    assert between.records[0].training["loss"] == pytest.approx(usual.records[0].training["loss"], rel=0.3)


def test_a_run_in_which_all_sites_refuse_ends_with_their_reason(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, policy=Policy(methods=frozenset({"fedavg"}), groups=frozenset({"direction"})))
    between, _ = served(experiment(), tmp_path, nodes=nodes)
    with pytest.raises(QuorumLost, match="from this site only direction leave"):
        list(between)


def test_a_file_is_read_and_options_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('methods = ["fedavg"]\ngroups = ["parameters"]\nmin_count = 5\nseconds = 60\ncounts = false\n')
    policy = join_policy(path, ["method=fedprox"], ["0" * 16], None)
    assert policy.methods == {"fedavg", "fedprox"}
    assert (policy.groups, policy.min_count, policy.seconds, policy.counts) == ({"parameters"}, 5, 60, False)
    assert policy.experiments == {"0" * 16}
    assert join_policy(path, [], [], 5.0).seconds == 5


def test_the_file_in_the_docs_is_valid_and_shows_values_that_are_not_the_defaults(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    block = re.search(r"site\.toml`; every key may be left out:\n\n((?:    .*\n)+)", page)
    assert block is not None
    path = tmp_path / "site.toml"
    path.write_text(block[1])
    policy, keys = read_policy(path), set(tomllib.loads(block[1]))
    assert all(getattr(policy, key) != getattr(Policy(), key) for key in keys)
    assert {field.name for field in fields(Policy)} - keys == {"models", "experiments", "steps", "rounds", "parameters"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_cuont = 5", "min_count"),
        ("clip = [1.0]", "clip"),
        ('metrics = "loss"', "metrics"),
        ("methods = [1]", "methods"),
        ("memory = -1", "memory"),
        ("[methods]\nfedavg = true", "methods"),
        ("min_count = 0", "min_count"),
        ('methods = ["fedagv"]', "fedavg"),
        ("counts = 3", "counts"),
        ("methods = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_gets_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_policy(tmp_path / "site.toml")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_more_memory_than_allowed_is_an_error_not_a_killed_machine() -> None:
    code = "from fedskew.deploy.limits import memory_limit; memory_limit(200); bytearray(400 << 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr
