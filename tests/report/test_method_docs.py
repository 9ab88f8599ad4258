"""The list of methods: bytes from shapes, words from the files, and a page that is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedskew.experiment.costs import measure_costs
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.taunorm import TauNorm
from fedskew.models import build
from fedskew.report.method_docs import CLASSES, MODEL, SHAPE, details, entry, fedavg, page

CONTROLS = {"local", "central"}
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
        ("feddyn", 0, 0, WEIGHTS),
        ("feddc", WEIGHTS, WEIGHTS, 2 * WEIGHTS),
        ("fednova", 0, 16, 0),
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
def test_every_method_names_its_paper_and_whose_each_default_is(name: str) -> None:
    one = entry(name)
    assert bool(one.reference) == (name not in CONTROLS)
    assert [setting for setting, (_, whose) in one.settings.items() if not whose] == []
    assert one.models


@pytest.mark.parametrize(
    ("name", "models"),
    [("fedavg", "global"), ("ditto", "global + personal"), ("fedper", "personal"), ("fedcrc", "global + personal")],
)
def test_tells_which_models_a_method_gives(name: str, models: str) -> None:
    assert entry(name).models == models


def test_shows_one_method_in_full() -> None:
    text = "\n".join(details(entry("moon")))
    assert "MOON: Model-Contrastive Federated Learning." in text
    assert "tau = 0.5   the original's" in text
    assert f"A client keeps previous: {WEIGHTS:,}".replace(",", " ") in text


def test_the_page_in_docs_is_the_one_made_from_the_methods() -> None:
    made = Path(__file__).parents[2] / "docs" / "methods.md"
    assert made.read_text() == page(), "docs/methods.md is stale: make docs"


def test_the_costs_follow_from_the_model() -> None:
    """tau-norm's broadcast holds a second head: C (d + 1) numbers."""
    small = measure_costs(TauNorm(), "mlp", (1, 8, 8), 3)
    plain = measure_costs(FedAvg(), "mlp", (1, 8, 8), 3)
    assert sum(small.down.values()) - sum(plain.down.values()) == 4 * 3 * (200 + 1)
    assert fedavg() == measure_costs(FedAvg(), MODEL, SHAPE, CLASSES)
