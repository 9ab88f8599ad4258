"""The closing table: figures that cannot hide a class, and a line for each client that has a name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedskew.cli.closing import client_rows, figure_rows
from fedskew.evaluation.metrics import ClientMetrics, ClientRow, Metrics, ModelMetrics, Population


def test_a_run_on_hospitals_ends_with_f1_and_auroc_of_each(fedskew: Any) -> None:
    said = fedskew("run", "--data", "heart", "--split", "natural", "--rounds", "1")
    assert said.code == 0
    head, _, table = said.out.partition("each client's own test part")
    assert "macro F1" in head
    assert "AUROC" in head
    lines = table.splitlines()
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        (line,) = [line for line in lines if line.startswith(hospital)]
        assert line.count("│") == 5


def test_clients_without_names_have_no_lines_of_their_own(fedskew: Any) -> None:
    said = fedskew("run", "--rounds", "1")
    assert "each client's own test part" not in said.out
    assert "macro F1" not in said.out  # ten balanced classes: accuracy is enough


def test_a_model_that_calls_everyone_healthy_is_not_perfect_where_everyone_is() -> None:
    """Site b has healthy patients only: recall of the only class is 100 %, which says nothing about telling apart."""

    def row(per_class: list[float | None], accuracy: float, balanced: float) -> ClientRow:
        model = ModelMetrics(
            accuracy=accuracy, loss=0.1, per_class=per_class, balanced_accuracy=balanced, macro_f1=balanced
        )
        return ClientRow(samples=6, global_=model, personal=model)

    result: Any = SimpleNamespace(
        sites=["a", "b"], clients={"0": row([1.0, 0.0], 0.975, 0.5), "1": row([1.0, None], 1.0, 1.0)}
    )
    a, b = client_rows(result)
    assert a == ["a", "6", "97.50", "50.00", "50.00", "-"]
    assert b == ["b", "6", "100.00", "-", "-", "-"]


def test_pooled_samples_of_one_class_have_no_balanced_accuracy_in_the_table() -> None:
    """All 20 samples of the clients are of healthy patients, whom the model always names: 100 % of nothing."""

    def clients(samples: list[int], per_class: list[float | None]) -> Any:
        more: dict[str, Any] = {"samples": samples, "per_class": per_class, "predicted": [20, 0], "macro_f1": 1.0}
        found = ClientMetrics(
            mean=1.0, weighted=1.0, std=0.0, worst_decile=1.0, loss=0.1, clients=2, balanced_accuracy=1.0, **more
        )
        metrics = Metrics(clients=Population(global_=found, personal=found, never_trained=0, sampled=False))
        return SimpleNamespace(metrics=metrics)

    assert "balanced" in figure_rows(clients([19, 1], [1.0, 0.0]))[0][1]
    assert not any("balanced" in words or "F1" in words for _, words, _ in figure_rows(clients([20, 0], [1.0, None])))
