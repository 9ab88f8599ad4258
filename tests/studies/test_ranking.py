"""Methods in order, differences paired by seed, and what may be said about them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fedskew.evaluation.figures import FIGURES
from fedskew.evaluation.metrics import ClientMetrics, Metrics, ModelMetrics, Population
from fedskew.studies.ranking import baseline_of, common_figure, finding, margin, over_text, rank

ACCURACY, LOSS = FIGURES["global"], FIGURES["loss"]


def said(values: Mapping[str, Mapping[int, float]], baseline: str | None = "fedavg") -> str:
    return finding(rank(values, ACCURACY, baseline), ACCURACY, baseline)


def test_the_margin_is_that_of_paired_differences() -> None:
    """1, 2, 3: standard deviation 1, standard error 1 / sqrt(3) = 0.577, t(2) = 4.303, so 2.484."""
    assert margin([1.0, 2.0, 3.0]) == pytest.approx(2.484, abs=1e-3)
    assert margin([1.0]) is None
    assert margin([1.0, 1.0]) is None


def test_methods_are_ordered_best_first_and_those_without_the_figure_last() -> None:
    values = {"fedper": {}, "fedavg": {0: 0.5, 1: 0.5}, "fedprox": {0: 0.6, 1: 0.8}}
    ranked = rank(values, ACCURACY, "fedavg")
    assert [(s.method, s.best) for s in ranked] == [("fedprox", True), ("fedavg", False), ("fedper", False)]
    assert ranked[0].over is not None
    assert ranked[0].over.mean == pytest.approx(0.2)
    assert ranked[1].over is ranked[2].over is None
    assert [s.method for s in rank({"fedavg": {0: 0.5}, "fedprox": {0: 0.6}}, LOSS, "fedavg")] == ["fedavg", "fedprox"]


def test_differences_use_only_seeds_that_both_finished() -> None:
    """Seed 2 of FedProx has no partner: its 0.9 must not make FedProx look better."""
    (first, _) = rank({"fedavg": {0: 0.5, 1: 0.7}, "fedprox": {0: 0.51, 1: 0.71, 2: 0.9}}, ACCURACY, "fedavg")
    assert first.over is not None
    assert (first.over.mean, first.over.seeds) == (pytest.approx(0.01), 2)
    assert over_text(first.over, ACCURACY) == "+1.00"


def test_a_clear_lead_is_stated_with_its_interval() -> None:
    """Differences 2, 2.5, 3 points: mean 2.5, standard error 0.289, margin 4.303 * 0.289 = 1.24."""
    found = said({"fedavg": {0: 0.5, 1: 0.6, 2: 0.7}, "fedprox": {0: 0.52, 1: 0.625, 2: 0.73}})
    assert found == "fedprox is ahead of fedavg by 2.5 ± 1.2 points of accuracy (global model, test set) over 3 seeds."
    behind = said({"fedavg": {0: 0.52, 1: 0.625, 2: 0.73}, "fedprox": {0: 0.5, 1: 0.6, 2: 0.7}})
    assert behind.startswith("fedprox is behind fedavg by 2.5 ± 1.2 points")


def test_what_cannot_be_told_apart_is_not_called_a_lead() -> None:
    found = said({"fedavg": {0: 0.5, 1: 0.6, 2: 0.5}, "fedprox": {0: 0.56, 1: 0.58, 2: 0.5}})
    assert "cannot be told apart" in found
    assert "ahead" not in found
    assert "cannot be told apart" in said({"fedavg": {0: 0.5, 1: 0.6, 2: 0.7}, "fedprox": {0: 0.5, 1: 0.6, 2: 0.7}})


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_never_give_a_verdict(seeds: int) -> None:
    """Two seeds that differ by the same 3 of 360 test samples would have an interval of width 0."""
    found = said({"fedavg": dict.fromkeys(range(seeds), 0.5), "fedprox": dict.fromkeys(range(seeds), 0.9)})
    assert "Fewer than 3 seeds cannot tell a difference from luck" in found
    assert "is ahead" not in found


def test_the_best_of_many_methods_needs_a_stricter_interval() -> None:
    """Differences 2, 3, 4 points: margin 2.48 alone, but with ten methods (level 99.5 %) 14.1 * 0.577 = 8.1."""
    base = {0: 0.5, 1: 0.6, 2: 0.7}
    lead = {0: 0.52, 1: 0.63, 2: 0.74}
    assert "is ahead of fedavg by 3.0 ± 2.5 points" in said({"fedavg": base, "fedprox": lead})
    many = said({"fedavg": base, "fedprox": lead} | {f"other{i}": base for i in range(9)})
    assert "fedprox, the best of the 10 other methods, ends ahead" in many
    assert "one of several methods looks best by chance" in many
    assert "is ahead" not in many


def test_without_fedavg_or_with_one_method_no_interval_is_claimed() -> None:
    found = said({"fedprox": {0: 0.6, 1: 0.6}, "moon": {0: 0.5, 1: 0.5}}, None)
    assert "fedprox has the best accuracy" in found
    assert "Without fedavg" in found
    assert said({"fedavg": {0: 0.5}}) == ""
    assert said({"fedavg": {0: 0.5}, "fedper": {}}) == ""


def evaluation(samples: list[int], personal_only: bool = False) -> Metrics:
    detail = {"per_class": [0.9, 0.1], "samples": samples, "predicted": samples, "balanced_accuracy": 0.5}
    if not personal_only:
        return Metrics(global_=ModelMetrics(accuracy=0.9, loss=1.0, **detail))  # type: ignore[arg-type]
    own = ClientMetrics(mean=0.95, weighted=0.9, std=0, worst_decile=0.5, loss=1, clients=2, **detail)  # type: ignore[arg-type]
    return Metrics(clients=Population(global_=None, personal=own, never_trained=0, sampled=False))


def test_methods_are_compared_on_the_same_samples() -> None:
    """FedPer's personal models on their own test parts are not put beside FedAvg's global model on the test set."""
    found = common_figure({"fedavg": [evaluation([50, 50])], "fedper": [evaluation([50, 50], True)]}, "fedavg")
    assert found.key == "global"
    assert common_figure({"fedper": [evaluation([50, 50], True)]}, None).key == "personal"


def test_imbalanced_test_samples_are_compared_by_balanced_accuracy() -> None:
    assert common_figure({"fedavg": [evaluation([95, 5])]}, "fedavg").key == "balanced"
    assert common_figure({"fedavg": [evaluation([50, 50]), evaluation([95, 5])]}, "fedavg").key == "balanced"
    assert common_figure({"fedavg": [evaluation([95, 5])]}, "fedavg", "f1").key == "f1"


def test_the_baseline_is_fedavg_as_it_is_if_it_is_there() -> None:
    assert baseline_of(["fedprox", "fedavg:weighting=equal", "fedavg"]) == "fedavg"
    assert baseline_of(["fedprox", "fedavg:weighting=equal"]) == "fedavg:weighting=equal"
    assert baseline_of(["fedprox", "fedavgm"]) is None
