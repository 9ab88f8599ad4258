"""Which figure leads: a model that calls every patient healthy must not look good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.evaluation.cautions import cautions
from fedskew.evaluation.figures import FIGURES, check_goal, headline, leading_figure, target_value
from fedskew.evaluation.metrics import ClientMetrics, Metrics, ModelMetrics, Over, Population, Spread
from fedskew.studies.tune import criterion


def all_healthy(healthy: int, sick: int) -> ModelMetrics:
    """A model that says class 0 for every sample."""
    total = healthy + sick
    return ModelMetrics(
        accuracy=healthy / total,
        loss=0.1,
        per_class=[1.0, 0.0],
        samples=[healthy, sick],
        predicted=[total, 0],
        balanced_accuracy=0.5,
        macro_f1=healthy / (healthy + total),
    )


def over_clients(samples: list[int], **figures: Any) -> ClientMetrics:
    blank: dict[str, Any] = {"mean": 0.9, "weighted": 0.8, "std": 0.0, "worst_decile": 0.1, "loss": 0.3, "clients": 2}
    return ClientMetrics(
        **blank
        | {"per_class": [0.9, 0.1], "samples": samples, "predicted": samples, "balanced_accuracy": 0.6}
        | figures
    )


def of_clients(shared: ClientMetrics | None, personal: ClientMetrics) -> Metrics:
    return Metrics(clients=Population(global_=shared, personal=personal, never_trained=0, sampled=False))


@pytest.mark.parametrize(
    ("samples", "balanced"), [([10, 10], True), ([10, 13], True), ([10, 14], False), ([10, 0], False)]
)
def test_samples_are_balanced_if_no_class_has_more_than_1_3_times_another_s(samples: list[int], balanced: bool) -> None:
    metrics = Metrics(global_=all_healthy(*samples))
    assert metrics.global_ is not None
    assert metrics.global_.balanced is balanced
    assert FIGURES["global"].name(metrics) == f"global model, {'balanced ' if balanced else ''}test set"


def test_where_the_test_set_is_not_balanced_the_balanced_accuracy_leads() -> None:
    metrics = Metrics(global_=all_healthy(39, 1))
    assert headline(metrics) == 0.5
    assert headline(metrics, "accuracy") == 0.975
    assert headline(Metrics(global_=all_healthy(10, 10))) == 0.5
    figure = leading_figure(Metrics(global_=all_healthy(10, 10)))
    assert figure is not None
    assert (figure.key, figure.measure) == ("global", "accuracy")


def test_without_a_test_set_the_clients_pooled_samples_decide() -> None:
    even, uneven = over_clients([10, 10]), over_clients([10, 90])
    assert headline(of_clients(even, even)) == 0.9
    assert headline(of_clients(uneven, uneven)) == 0.6
    assert (
        of_clients(even, uneven).leading is even
    )  # the personal models stand for a run only if there is no global one
    figure = leading_figure(of_clients(None, uneven))
    assert figure is not None
    assert figure.key == "personal_balanced"


def test_a_run_of_an_earlier_version_is_led_by_accuracy_and_not_called_balanced() -> None:
    old = Metrics(global_=ModelMetrics(accuracy=0.7, loss=1.0, per_class=[0.7, 0.7]))
    assert headline(old) == 0.7
    assert FIGURES["global"].name(old) == "global model, test set"


def test_a_goal_is_read_of_the_model_that_leads() -> None:
    assert headline(Metrics(global_=all_healthy(30, 10)), "f1") == 30 / 70
    assert headline(of_clients(over_clients([1, 1], macro_f1=0.4), over_clients([1, 1])), "f1") == 0.4
    assert headline(of_clients(over_clients([1, 1]), over_clients([1, 1], auroc=0.8)), "personal_auroc") == 0.8
    assert headline(Metrics(global_=all_healthy(30, 10)), "personal_auroc") is None
    with pytest.raises(UsageError, match=r"unknown goal 'f2'; did you mean 'f1'\?"):
        check_goal("f2")


def test_what_is_tuned_is_balanced_accuracy_where_validation_samples_are_not_balanced() -> None:
    even, uneven = over_clients([10, 10]), over_clients([10, 90])
    assert criterion(of_clients(even, even), None) == 0.8
    assert criterion(of_clients(None, even), None) == 0.9
    assert criterion(of_clients(uneven, uneven), None) == 0.6
    assert criterion(of_clients(uneven, uneven), "global") == 0.8
    assert criterion(of_clients(uneven, uneven), "loss") == -0.3
    assert criterion(of_clients(uneven, uneven), "auroc") is None


@pytest.mark.parametrize("given", [0.8, 1.0, 0.0, -5.0, 101.0, float("nan"), float("inf")])
def test_a_target_that_is_no_percentage_is_a_mistake(given: float) -> None:
    with pytest.raises(
        UsageError, match=f"--target {given:g} is invalid: .*{'did you mean' if 0 < given <= 1 else ''}"
    ):
        target_value(given, None)


def test_a_target_is_in_the_unit_that_is_printed() -> None:
    assert target_value(80, "f1") == 0.8
    assert target_value(0.5, "ece") == 0.005
    assert target_value(0.8, "loss") == 0.8
    with pytest.raises(UsageError, match="did you mean 80"):
        target_value(0.8, "f1")


def test_a_class_that_is_never_recognised_is_a_warning() -> None:
    assert cautions(Metrics(global_=all_healthy(39, 1)), ["healthy", "sick"]) == [
        "warning: the global model predicts class 'healthy' for every sample",
        "warning: the global model recognised no sample of class 'sick' (0 of 1)",
    ]
    fine = ModelMetrics(accuracy=0.9, loss=0.1, per_class=[0.9, 0.9], samples=[9, 9], predicted=[9, 9])
    assert cautions(Metrics(global_=fine)) == []
    assert cautions(None) == []


def test_personal_models_that_miss_a_class_are_a_warning_of_their_own() -> None:
    shared = over_clients([5, 5], per_class=[0.5, 0.5])
    personal = over_clients([5, 5], per_class=[1.0, 0.0])
    assert cautions(of_clients(shared, personal)) == [
        "warning: the personal models recognised no sample of class 1 (0 of 5)"
    ]


def test_many_missed_classes_are_one_warning_and_absent_ones_a_note() -> None:
    blank = ModelMetrics(
        accuracy=0.5, loss=1.0, per_class=[1.0, *[0.0] * 7, None], samples=[1] * 8 + [0], predicted=[4, 4, *[0] * 7]
    )
    assert cautions(Metrics(global_=blank)) == [
        "warning: the global model recognised no sample of 7 classes: 1, 2, 3, 4, 5 and others",
        "note: 1 of 9 classes have no test sample (8); balanced accuracy, AUROC and AUPRC leave them out",
    ]


def test_samples_of_one_class_are_a_warning() -> None:
    """A model that always says class 0 has 100 % of every figure there."""
    perfect = over_clients([20, 0], per_class=[1.0, None], predicted=[20, 0], balanced_accuracy=1.0)
    assert cautions(of_clients(perfect, perfect), ["healthy", "sick"])[0] == (
        "warning: all test samples are of class 'healthy', so these figures do not show whether a model tells classes "
        "apart"
    )
    fine = ModelMetrics(accuracy=0.9, loss=0.1, per_class=[0.9, 0.9], samples=[9, 9], predicted=[9, 9])
    both = Metrics(global_=fine, clients=Population(global_=perfect, personal=perfect, never_trained=0, sampled=False))
    (warning,) = cautions(both)
    assert warning.startswith("warning: the clients' test samples are all of class 0, so these figures")


def test_personal_models_of_clients_with_one_class_are_not_praised_in_silence() -> None:
    def over(several: int) -> Spread:
        one = Over(mean=1.0, std=0.0, worst_decile=1.0, clients=4)
        return Spread(balanced_accuracy=one, auroc=msgspec.structs.replace(one, clients=several) if several else None)

    for several, said in ((0, "4 of 4"), (1, "3 of 4"), (2, ""), (4, "")):
        personal = over_clients([9, 9], clients=4, over=over(several))
        found = cautions(of_clients(None, personal))
        assert [said in sentence and "one class only" in sentence for sentence in found] == [True] * bool(said)


def hospitals(path: Path) -> str:
    """Five hospitals, 1000 patients of whom 25 are sick, and columns that say nothing about it."""
    lines = ["a,b,hospital,diagnosis"]
    for i in range(1000):
        lines.append(f"{i * 7 % 11},{i * 5 % 13},h{i % 5},{'sick' if i % 40 == 0 else 'healthy'}")
    path.write_text("\n".join(lines) + "\n")
    return f"{path}?label=diagnosis&owner=hospital"


def test_a_model_that_calls_every_patient_healthy_is_not_shown_as_good(fedskew: Any, tmp_path: Path) -> None:
    data = hospitals(tmp_path / "hospitals.csv")
    words = ["run", "--data", data, "--split", "natural", "--rounds", "2", "--model", "mlp:hidden=4"]
    done = fedskew(*words)
    assert "balanced test set" not in done.out
    assert "round 2/2 test balanced accuracy 50.00 %" in done.out
    first = next(line for line in done.out.splitlines() if "│" in line)
    assert "balanced accuracy" in first
    assert first.endswith(" 50.00")
    assert "warning: the global model recognised no sample of class 'sick' (0 of " in done.out
    assert "warning: the global model predicts class 'healthy' for every sample" in done.out
    result = fedskew(*words, "--json").json()
    assert result["headline"] == "balanced"
    assert result["accuracy"] > 0.95
    assert len(result["warnings"]) == 3  # the third: the clients' test samples are all healthy
    assert sum(map(sum, result["confusion"]["global"])) == sum(result["metrics"]["global"]["samples"])
