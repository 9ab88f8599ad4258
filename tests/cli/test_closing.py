"""The closing table: figures that cannot hide a class, and a line for each client that has a name."""

from __future__ import annotations

from typing import Any


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


def test_a_hospital_with_healthy_patients_only_has_no_balanced_accuracy(fedskew: Any, tmp_path: Any) -> None:
    """The model calls every patient of `b` healthy, and all are: 100 % of one class says nothing of the other."""
    rows = [f"{'a' if i % 2 else 'b'},{i % 7},{'sick' if i % 4 == 1 else 'healthy'}" for i in range(160)]
    (tmp_path / "patients.csv").write_text("\n".join(["hospital,value,diagnosis", *rows]))
    data = f"{tmp_path / 'patients.csv'}?label=diagnosis&owner=hospital"
    said = fedskew("run", "--data", data, "--split", "natural", "--rounds", "1", "--workers", "1")
    assert said.code == 0, said.err
    lines = said.out.partition("each client's own test part")[2].splitlines()
    (a,) = [line for line in lines if line.startswith("a ")]
    (b,) = [line for line in lines if line.startswith("b ")]
    assert "-" not in a
    assert [cell.strip() for cell in b.split("│")[3:]] == ["-", "-", "-"]
