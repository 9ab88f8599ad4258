"""The robust rules beside those of byzfl, an independent implementation; skipped where byzfl is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fedskew.federation.robust import geometric, krum, mean, median, nearest_means, trimmed

FOUND = find_spec("byzfl")
pytestmark = pytest.mark.skipif(FOUND is None, reason="byzfl is not installed (pip install --no-deps byzfl)")


@pytest.fixture(scope="module")
def byzfl() -> Iterator[Any]:
    """byzfl's aggregators. The package itself is not imported: it would need torchvision and seaborn."""
    assert FOUND is not None
    package = ModuleType("byzfl")
    package.__path__ = list(FOUND.submodule_search_locations or ())
    sys.modules["byzfl"] = package
    yield import_module("byzfl.aggregators")
    for name in [name for name in sys.modules if name.split(".")[0] == "byzfl"]:
        del sys.modules[name]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """(updates of 3 to 9 clients with 4 entries, of which the first are hostile; how many are hostile)."""
    clients = draw(st.integers(3, 9))
    hostile = draw(st.integers(0, (clients - 1) // 2))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    vectors = rng.normal(size=(clients, 4))
    vectors[:hostile] *= draw(st.sampled_from([-3.0, 10.0, 1e4]))
    return torch.tensor(vectors, dtype=torch.float64), hostile


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_mean_trimmed_mean_median_and_nearest_neighbour_mixing_are_byzfls(byzfl: Any, case: Any) -> None:
    vectors, hostile = case
    for ours, theirs in (
        (mean(vectors, hostile)[0], byzfl.Average()),
        (trimmed(vectors, hostile)[0], byzfl.TrMean(hostile)),
        (median(vectors, hostile)[0], byzfl.Median()),
        (nearest_means(vectors, hostile) @ vectors, byzfl.NNM(hostile)),
    ):
        assert_close(ours, torch.from_numpy(theirs(vectors.numpy())))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_the_geometric_median_is_byzfls_after_as_many_steps_as_it_needs(byzfl: Any, case: Any) -> None:
    """byzfl takes three steps from 0 with distances of at least 0.1; here it gets 3000 steps and nearly no bound."""
    vectors, hostile = case
    theirs = torch.from_numpy(byzfl.GeometricMedian(nu=1e-9, T=3000)(vectors.numpy()))
    ours = geometric(vectors, hostile)[0]
    far = [float((vectors - point).norm(dim=1).sum()) for point in (ours, theirs)]
    assert far[0] == pytest.approx(far[1], rel=1e-4)


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_multi_krum_is_byzfls_where_the_attackers_are_far(byzfl: Any, case: Any) -> None:
    """byzfl counts one neighbour more than the paper (K - f - 1, not K - f - 2), so close calls may differ."""
    vectors, hostile = case
    vectors = vectors.clone()
    vectors[:hostile] = 1e3 * torch.arange(1.0, hostile + 1, dtype=torch.float64)[:, None] ** 2
    if len(vectors) - hostile - 2 < hostile:  # too few neighbours to tell attackers apart, with either count
        return
    assert_close(krum(vectors, hostile)[0], torch.from_numpy(byzfl.MultiKrum(hostile)(vectors.numpy())))
