"""Which methods are raced: limits are kept, the nearest tasks of the board come first, FedAvg and its like always."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.methods import REGISTRY
from fedskew.models import build
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.shortlist import ALWAYS, FAR, GENERAL, Limits, Shortlist, leaders, make_shortlist, nearest
from fedskew.studies.board.evidence import Row, Task, read_task, shipped

SKEW = {
    "clients": 10.0,
    "total_variation": 0.6,
    "empty_cells": 0.4,
    "size_gini": 0.3,
    "imbalance_factor": 1.0,
    "features": None,
}
NET = (partial(build, "mlp", (1, 8, 8), 10, seed=0), (1, 8, 8), 10)


def task(name: str, rows: Sequence[tuple[str, float | None]], **skew: float | None) -> Task:
    made = [
        Row(method=method, lr=0.1, seeds=3, value=value, over=0.01, figures={"personal": value}, own_over=0.02)
        for method, value in rows
    ]
    about = {"title": f"task {name}", "goal": "global", "commit": "", "cpu": ""}
    return Task(name=name, skew=SKEW | skew, rows=made, **about)


def listed(
    limits: Limits | None = None, tasks: Sequence[Task] = (), *, public: int = 0, goal: str = "own", **more: Any
) -> Shortlist:
    model: Any = goal
    return make_shortlist(SKEW, Goal(model, "accuracy"), limits or Limits(), tasks, public=public, net=NET, **more)


def test_no_method_that_needs_public_data_is_raced_where_there_are_none() -> None:
    found = listed()
    assert not any(REGISTRY[name].public for name in found.methods)
    assert "there are none" in found.excluded["fedddc"]
    assert "fedddc" in listed(public=20).methods
    assert "fedddc" in listed(Limits(public=False), public=20).excluded
    board = [task("t1", [("feddf", 0.9), ("publiconly", 0.8)])]
    assert not any(REGISTRY[name].public for name in listed(tasks=board).methods)  # though it led on the board


def test_fedavg_and_its_like_are_always_raced_unless_a_limit_forbids_them_which_is_said() -> None:
    assert set(ALWAYS) <= set(listed().methods)
    found = listed(Limits(state=False))
    assert "at each client between rounds" in found.excluded["local"]
    assert {"fedavg", "fedavgm", "finetune"} <= set(found.methods)
    assert {"scaffold", "ditto", "fedrep", "fedrod"} <= set(found.excluded)


def test_sums_only_leaves_out_methods_that_need_single_clients() -> None:
    found = listed(Limits(sums_only=True))
    assert "fedcd" in found.excluded
    assert all(REGISTRY[name].sums_only for name in found.methods)


def test_bytes_are_those_of_the_users_net_up_and_down_together() -> None:
    """FedAvg sends the net both ways; SCAFFOLD sends twice as much; training alone sends nothing."""
    plain = 2 * 4 * sum(p.numel() for p in NET[0]().parameters())
    found = listed(Limits(max_bytes=plain))
    assert "fedavg" in found.methods
    assert "more than" in found.excluded["scaffold"]
    tight = listed(Limits(max_bytes=plain - 1))
    assert "fedavg" in tight.excluded
    assert "local" in tight.methods
    with pytest.raises(UsageError, match="at least 1"):
        Limits(max_bytes=0)


def test_methods_without_a_global_model_are_not_raced_for_one() -> None:
    found = listed(goal="global")
    assert found.excluded["fedrep"] == found.excluded["local"] == "has no global model"
    assert "fedrep" in listed(goal="own").methods
    assert found.excluded["finetune"] == "has FedAvg's global model"
    assert "fedavg" in found.methods


def test_without_evidence_the_list_is_general_and_says_so() -> None:
    found = listed(public=10)
    assert set(found.methods) == {*ALWAYS, *GENERAL}
    assert "no evidence yet" in found.note
    assert found.nearest == []


def test_the_nearest_tasks_give_their_leaders_with_their_evidence() -> None:
    near = task("near", [("fedprox:mu=0.1", 0.8), ("fedavg", 0.9), ("moon", 0.7), ("central", 0.99), ("fedic", None)])
    far = task("far", [("fedlc", 0.9)], total_variation=0.5)
    farther = task("farther", [("fedbn", 0.9)], total_variation=0.5, size_gini=0.2)
    found = listed(tasks=[farther, far, near])
    assert [n.task for n in found.nearest] == ["near", "far"]
    assert found.nearest[0].distance == 0
    assert [row.method for row in found.nearest[0].rows] == ["fedprox:mu=0.1", "moon"]  # no control, none that failed
    assert found.methods["fedprox:mu=0.1"] == "led on near"
    assert "fedprox" not in found.methods
    assert "fedbn" not in found.methods
    assert len(found.methods) >= len(ALWAYS) + 8 - len(found.excluded)  # filled up with general methods


def test_a_task_without_a_common_figure_is_the_farthest_and_unknown_methods_are_left_out() -> None:
    blind = msgspec.structs.replace(task("blind", [("fedprox", 0.9), ("gone", 0.9)]), skew={})
    goal = Goal("own", "accuracy")
    assert [n.task for n in nearest(SKEW, [blind, task("other", [])], goal)] == ["other", "blind"]
    assert [row.method for row in leaders(blind, goal)] == ["fedprox"]


def test_a_task_with_another_skew_gives_no_method() -> None:
    iid = task("iid", [("fedlc", 0.9)], total_variation=0.0, empty_cells=0.0)
    found = listed(tasks=[iid], public=10)
    assert set(found.methods) == {*ALWAYS, *GENERAL}
    assert "no task like these data (the nearest is iid" in found.note
    assert found.nearest == []


def test_a_task_whose_fedavg_has_not_converged_gives_no_method() -> None:
    """Its leaders are those that start fast."""
    rising = msgspec.structs.replace(task("rising", [("fedlc", 0.9)]), unsettled="fedavg still rises")
    assert "fedlc" not in listed(tasks=[rising]).methods
    assert "no evidence yet" in listed(tasks=[rising]).note


def test_no_two_tasks_of_the_board_count_as_one_skew() -> None:
    """The distance that counts as like lies between that of a task to itself and that to any other."""
    for one, other in combinations(shipped(), 2):
        assert nearest(one.skew, [other], Goal("own", "accuracy"))[0].distance > FAR, (one.name, other.name)


def test_leaders_are_those_of_the_kind_of_model_that_is_asked_for() -> None:
    rows = [
        Row(method="scaffold", lr=0.1, seeds=3, value=0.9, figures={"personal": 0.5}),
        Row(method="ditto", lr=0.1, seeds=3, value=0.6, figures={"personal": 0.8}),
        Row(method="fedrep", lr=0.1, seeds=3, value=None, figures={"personal": 0.7}),
    ]
    both = msgspec.structs.replace(task("both", []), rows=rows)
    assert [row.method for row in leaders(both, Goal("own", "accuracy"))] == ["ditto", "fedrep", "scaffold"]
    assert [row.method for row in leaders(both, Goal("global", "accuracy"))] == ["scaffold", "ditto"]


def test_given_methods_replace_the_list() -> None:
    found = listed(given=("moon", "fedavg"))
    assert set(found.methods) == {*ALWAYS, "moon"}


def test_a_file_that_is_no_task_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"name": 1}')
    with pytest.raises(UsageError, match="not a task of the board"):
        read_task(path)
