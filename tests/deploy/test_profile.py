"""`serve --profile`: label counts leave a site only if its operator allows it, and none of too few samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.core.settings import UsageError
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.messages import SiteFacts, problem_in_facts
from fedskew.deploy.policy import Policy, join_policy
from fedskew.deploy.profile import describe, skew_between, told_counts
from fedskew.experiment.config import Experiment, from_dict
from fedskew.report.html import write_report
from sites import NAMES, nodes_in, served

pytestmark = pytest.mark.slow  # dozens of small federations

COUNTS = ((12, 8, 0), (0, 8, 12), (10, 0, 10))  # of classes a, b, c at each site: 20 training samples each
ALLOWED = Policy(profile=True)


def own_data(folder: Path, counts: Any = COUNTS) -> list[str]:
    """A file for each site, with these training samples of each class and one test sample of each class it has."""
    folder.mkdir(exist_ok=True)
    rng, paths = np.random.default_rng(0), []
    for name, row in zip(NAMES, counts, strict=True):
        y, y_test = np.repeat(["a", "b", "c"], row), np.array(["a", "b", "c"])[np.array(row) > 0]
        x, x_test = (rng.integers(0, 255, (len(labels), 4, 4), np.uint8) for labels in (y, y_test))
        paths.append(str(folder / f"{name}.npz"))
        np.savez(paths[-1], x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return paths


def experiment(**more: Any) -> Experiment:
    values = {"data": "sites", "model": "mlp:hidden=4", "rounds": 1, "trouble": {"quorum": 2}}
    return from_dict(values | more)


def profiled(folder: Path, *, refusing: tuple[int, ...] = (), counts: Any = COUNTS, **options: Any) -> Any:
    """(a finished run that asked for label counts, what its operator read, its sites)."""
    paths, said = own_data(folder, counts), list[str]()
    allowing, others = nodes_in(folder, paths, ALLOWED), nodes_in(folder, paths)
    nodes = [others[place] if place in refusing else allowing[place] for place in range(3)]
    what = options.pop("what", experiment())
    between, played = served(what, folder, nodes=nodes, said=said, **{"profile": True} | options)
    list(between)
    return between, said, played


# what a site tells


@pytest.mark.parametrize(
    ("counts", "least", "told"),
    [
        ((50, 20, 3), 1, (50, 20, 3)),
        ((50, 20, 0), 5, (50, 20, 0)),
        ((50, 20, 3), 5, (50, 0, 0)),  # 73 - 50 - 20 would give away the 3
        ((50, 20, 4, 3), 5, (50, 20, 0, 0)),  # 7 samples in one of two classes
        ((50, 20, 2, 2), 5, (50, 0, 0, 0)),  # 4 together are still too few
        ((97, 3), 5, (0, 0)),
        ((3,), 5, (0,)),
        ((9,), 5, (9,)),
    ],
)
def test_a_class_of_too_few_samples_cannot_be_computed_from_the_others(
    counts: tuple[int, ...], least: int, told: tuple[int, ...]
) -> None:
    assert told_counts(np.repeat(np.arange(len(counts)), counts), len(counts), least) == told


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), st.integers(1, 9))
def test_whatever_the_counts_each_is_right_or_kept_back_and_a_server_accepts_them(
    counts: list[int], least: int
) -> None:
    told = told_counts(np.repeat(np.arange(len(counts)), counts), len(counts), least)
    kept = [own for own, sent in zip(counts, told, strict=True) if own and not sent]
    assert all(sent in (0, own) for own, sent in zip(counts, told, strict=True))
    assert all(sent == 0 or sent >= least for sent in told)
    assert not any(told) or not kept or (len(kept) > 1 and sum(kept) >= least)
    labels = tuple(map(str, range(len(counts))))
    assert problem_in_facts(SiteFacts((2,), "float32", labels, sum(counts), counts=told)) == ""


# a run


def test_the_figures_of_the_sites_counts_are_those_of_the_same_split(tmp_path: Path) -> None:
    """Rows (12, 8, 0), (0, 8, 12), (10, 0, 10) of 20: the pooled mix is (22, 16, 22) / 60.

    Total variation: (|36 - 22| + |24 - 16| + 22) / 120 = 22/60 for the first and the second, and
    (|30 - 22| + 16 + |30 - 22|) / 120 = 16/60 for the third: the mean is 1/3.
    """
    between, said, _ = profiled(tmp_path)
    found = between.result.skew
    assert found["total_variation"] == pytest.approx(1 / 3)
    assert found["empty_cells"] == pytest.approx(3 / 9)
    assert found["size_gini"] == 0
    assert found["imbalance_factor"] == pytest.approx(22 / 16)
    assert (found["clients"], found["sites"], found["withheld"]) == (3, 3, 0)
    (line,) = [line for line in said if line.startswith("label counts")]
    assert line.startswith("label counts of 3 of 3 sites: total variation 0.33, ")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved["skew"] == found


def test_nothing_is_told_unless_the_server_asks_and_the_operator_allows_it(tmp_path: Path) -> None:
    unasked, said, _ = profiled(tmp_path / "unasked", profile=False)
    assert unasked.result.skew == {}
    assert unasked.agreed.counts == {}
    assert not any("label counts" in line for line in said)
    refused, said, _ = profiled(tmp_path / "refused", refusing=(0, 1, 2))
    assert refused.result.skew == {}
    assert refused.records[0].trained == [0, 1, 2]
    assert "label counts: fewer than two sites told theirs; north, south, west told none" in said
    assert unasked.result.digest == refused.result.digest == profiled(tmp_path / "all")[0].result.digest


def test_a_site_that_refuses_is_named_and_the_others_counts_are_used(tmp_path: Path) -> None:
    between, said, played = profiled(tmp_path, refusing=(1,))
    assert between.records[0].trained == [0, 1, 2]
    assert sorted(between.agreed.counts) == ["north", "west"]
    assert (between.result.skew["clients"], between.result.skew["sites"]) == (2, 3)
    assert any(line.startswith("label counts of 2 of 3 sites") and line.endswith("south told none") for line in said)
    assert any("the server asks for label counts; they stay here" in note for note in played.nodes[1].notes)
    assert any("tells the server its label counts, 20 of 20 samples" in note for note in played.nodes[0].notes)


def test_the_live_page_shows_the_counts_that_were_told_and_who_told_none(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `watch` is not installed")
    from fedskew.watch.app import snapshot
    from fedskew.watch.folder import Folder

    def split(folder: Path, **options: Any) -> dict[str, Any]:
        profiled(folder, **options)
        found: dict[str, Any] = json.loads(snapshot(Folder(folder / "run"), "")[0]["part-split"])
        return found

    told = split(tmp_path / "told", refusing=(1,))
    assert (told["columns"], told["rows"]) == (["north", "south", "west"], ["a", "b", "c"])
    assert told["points"] == [[0, 0, 12], [0, 1, 8], [2, 0, 10], [2, 2, 10]]
    assert "Not told by south." in told["note"]
    untold = split(tmp_path / "untold", profile=False)
    assert untold["kind"] == "text"
    assert "the sites have not told the server" in untold["note"]


def test_small_classes_are_kept_back_and_the_run_says_how_many(tmp_path: Path) -> None:
    """The first site has 2 of class c, so b (8) is kept back too: 10 of 62 samples."""
    between, said, _ = profiled(tmp_path, counts=((12, 8, 2), (0, 8, 12), (10, 0, 10)))
    assert between.agreed.counts["north"] == {"a": 12, "b": 0, "c": 0}
    assert between.result.skew["withheld"] == pytest.approx(10 / 62)
    assert any("16.1 % of samples in classes too small to be told" in line for line in said)
    told, _, _ = profiled(
        tmp_path / "all",
        counts=((12, 8, 2), (0, 8, 12), (10, 0, 10)),
        what=experiment(privacy={"min_count": 1}),
    )
    assert told.agreed.counts["north"] == {"a": 12, "b": 8, "c": 2}


def test_the_audit_says_that_counts_left(tmp_path: Path) -> None:
    """The request of a served run is answered once more, as `join` would, and recorded."""
    _, _, played = profiled(tmp_path, refusing=(1,))
    told = []
    for place in (0, 1):
        site = played.nodes[place]
        ask = next(ask for other, ask in played.asked if other == place and ask["kind"] == "hello")
        site.audit.record("here:1", "hello", *site.reply(ask, b""))
        told.append(json.loads(site.audit.path.read_text())["told"]["facts"])
    assert told[0]["counts"] == [12, 8, 0][: len(told[0]["labels"])]
    assert "counts" not in told[1]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([-1, 21], "Expected `int` >= 0"),
        ([10.5, 9.5], "Expected `int`"),
        (["20", "0"], "Expected `int`"),
        ("20", "Expected `array"),
        ([12, 8, 0], "reported label counts of 3 classes, but has 2"),
        ([12], "reported label counts of 1 classes, but has 2"),
        ([12, 9], "reported label counts of 21 samples, but has 20"),
        ([12, 7], "reported label counts of 19 samples, but has 20"),
        ([10**30, 0], "sent an invalid reply"),
        ([[12], [8]], "Expected `int`"),
    ],
)
def test_counts_that_cannot_be_true_leave_out_the_site_in_one_sentence(counts: Any, words: str, tmp_path: Path) -> None:
    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 0 and ask["kind"] == "hello":
            answer = answer | {"facts": answer["facts"] | {"counts": counts}}
        return answer, payload

    between, said, _ = profiled(tmp_path, spoil=spoil)
    assert between.records[0].trained == [1, 2]
    (line,) = [line for line in said if line.startswith("warning: site north ")]
    assert words in line
    assert sorted(between.agreed.counts) == ["south", "west"]


def test_counts_that_nobody_asked_for_are_not_kept(tmp_path: Path) -> None:
    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 0 and ask["kind"] == "hello":
            answer = answer | {"facts": answer["facts"] | {"counts": [12, 8]}}
        return answer, payload

    between, _, _ = profiled(tmp_path, profile=False, spoil=spoil)
    assert between.agreed.counts == {}
    assert "12" not in (tmp_path / "run" / "deployment.json").read_text().split('"counts"')[1]


def test_sites_that_tell_only_zeros_do_not_end_the_run() -> None:
    assert skew_between(("a", "b"), {"x": {"a": 0}, "y": {"b": 0}, "z": {"a": 3}}, {"x": 1, "y": 1, "z": 3}) == {}
    assert "fewer than two" in describe({}, [])
    stranger = {"x": {"a": 3}, "y": {"b": 4}, "stranger": {"a": 9}}
    assert skew_between(("a", "b"), stranger, {"x": 3, "y": 4})["clients"] == 2


def test_a_resumed_run_keeps_the_counts_it_was_told(tmp_path: Path) -> None:
    what = experiment(rounds=2)
    paths = own_data(tmp_path)
    first, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths, ALLOWED), profile=True)
    next(iter(first))
    first.directory.close()
    again, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths, ALLOWED), resume=True)
    list(again)
    assert again.result is not None
    assert again.result.skew["clients"] == 3


def test_the_report_shows_how_skewed_the_sites_are(tmp_path: Path) -> None:
    between, _, _ = profiled(tmp_path, refusing=(1,))
    page = tmp_path / "report.html"
    write_report([tmp_path / "run"], page, drift=False, data_dir=None)
    text = page.read_text()
    assert "2 of 3 sites told their label counts, without the 0.0 % of samples" in text
    assert f"total variation {between.result.skew['total_variation']:.2f}" in text


def test_a_data_set_that_the_server_splits_needs_no_profile(tmp_path: Path) -> None:
    what = from_dict({"split": "iid:clients=3", "model": "mlp:hidden=4", "rounds": 1})
    with pytest.raises(UsageError, match="--profile is for sites with their own data"):
        served(what, tmp_path, profile=True)
    between, _ = served(what, tmp_path)
    list(between)
    assert between.result is not None
    assert between.result.skew["clients"] == 3


def test_a_site_allows_it_by_option_or_by_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("profile = true\n")
    assert not join_policy(None, [], [], None).profile
    assert join_policy(None, [], [], None, profile=True).profile
    assert join_policy(tmp_path / "site.toml", [], [], None).profile
