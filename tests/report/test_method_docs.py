"""The list of methods: costs in bytes, texts from the declarations, and a page in docs that is up to date."""

from __future__ import annotations

from typing import Any

import pytest

from fedskew.experiment.costs import measure_costs
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.taunorm import TauNorm
from fedskew.models import build
from fedskew.report.leaks import LEAKS
from fedskew.report.method_docs import CLASSES, MODEL, SHAPE, details, entry, fedavg

net: Any = build(MODEL, SHAPE, CLASSES, seed=0)
WEIGHTS = 4 * sum(p.numel() for p in net.parameters())
HEAD = 4 * sum(p.numel() for p in net.head.parameters())
PROTOTYPES = 4 * CLASSES * (net.features + 1)  # a mean and a count a class


def test_fedavg_sends_the_model_both_ways_and_keeps_nothing() -> None:
    plain = measure_costs(FedAvg())
    assert sum(plain.down.values()) == sum(plain.up.values()) == sum(plain.server.values()) == WEIGHTS
    assert plain.client == {}


@pytest.mark.parametrize(
    ("name", "down", "up", "keeps"),
    [
        ("fedprox", 0, 0, 0),
        ("scaffold", WEIGHTS, WEIGHTS, WEIGHTS),
        ("feddyn", 16, 0, WEIGHTS),
        ("feddc", WEIGHTS + 16, WEIGHTS, 2 * WEIGHTS + 8),
        ("fednova", 0, 8, 0),
        ("moon", 0, 0, WEIGHTS),
        ("fedmr", PROTOTYPES, PROTOTYPES, 0),
        ("fedproto", PROTOTYPES - WEIGHTS, PROTOTYPES - WEIGHTS, WEIGHTS),
        ("fedbabu", -HEAD, -HEAD, 0),
        ("fedper", -HEAD, -HEAD, HEAD),
        ("fedcrc", 0, 0, HEAD),
        ("taunorm", HEAD, 0, 0),
        ("local", -WEIGHTS, -WEIGHTS, WEIGHTS),
    ],
)
def test_costs_beyond_fedavg_are_those_of_the_equations(name: str, down: int, up: int, keeps: int) -> None:
    one = entry(name)
    assert (one.down, one.up, sum(one.keeps.values())) == (down, up, keeps)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_group_that_leaves_a_site_is_put_into_words(name: str) -> None:
    """A new group without words would be missing from the page that tells an operator what leaves."""
    one = entry(name)
    assert [group for group in one.sends if group not in LEAKS] == []
    assert ("only sums" in "\n".join(details(one))) == REGISTRY[name].sums_only


@pytest.mark.parametrize("name", REGISTRY)
def test_every_entry_has_a_summary_settings_with_sources_and_models(name: str) -> None:
    one = entry(name)
    assert one.summary.endswith(".")
    assert one.text
    assert [key for key, setting in one.settings.items() if not (setting.help and setting.source)] == []
    assert one.models


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if kind.quick])
def test_the_quick_settings_leave_the_costs_as_they_are(name: str) -> None:
    """On a small net and small images, where the default number of server steps is affordable."""
    kind, setup = REGISTRY[name], ("mlp", (1, 4, 4), 3)
    assert measure_costs(kind(), *setup) == measure_costs(kind(**kind.quick), *setup)


@pytest.mark.parametrize(
    ("name", "models"),
    [("fedavg", "global"), ("ditto", "global + personal"), ("fedper", "personal"), ("fedcrc", "global + personal")],
)
def test_lists_which_models_a_method_gives(name: str, models: str) -> None:
    assert entry(name).models == models


def test_details_show_title_settings_and_client_state() -> None:
    text = "\n".join(details(entry("moon")))
    assert "MOON: Model-Contrastive Federated Learning." in text
    assert "Li, He, Song. CVPR 2021. arXiv:2103.16257" in text
    assert "  tau = 0.5   Temperature of the contrastive loss.\n    default: the paper" in text
    assert f"A client keeps previous: {WEIGHTS:,}".replace(",", " ") in text


def test_the_costs_follow_from_the_model() -> None:
    """tau-norm's broadcast holds a second head: C (d + 1) numbers."""
    small = measure_costs(TauNorm(), "mlp", (1, 8, 8), 3)
    plain = measure_costs(FedAvg(), "mlp", (1, 8, 8), 3)
    assert sum(small.down.values()) - sum(plain.down.values()) == 4 * 3 * (200 + 1)
    assert fedavg() == measure_costs(FedAvg(), MODEL, SHAPE, CLASSES)


def test_a_method_says_what_runs_it_is_meant_for() -> None:
    (sentence,) = entry("feddyn").meant
    assert sentence.startswith("Meant for SGD without momentum: ")
    assert sentence in details(entry("feddyn"))
    assert entry("fedavg").meant == []
