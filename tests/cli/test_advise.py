"""`fedskew advise` on a user's own table: one command, an answer, a page, and a command that runs the choice."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.cli.advise import read_bytes
from fedskew.core.settings import UsageError


def write_patients(path: Path) -> None:
    """120 patients of three hospitals, one of them with three patients and a name that is markup."""
    rng = np.random.default_rng(0)
    hospitals = ["<b>north</b>"] * 3 + ["south"] * 57 + ["west"] * 60
    sick = rng.random(120) < 0.4
    lines = [
        f"{h},{rng.normal() + 2 * s:.3f},{rng.normal() - s:.3f},{'sick' if s else 'well'}"
        for h, s in zip(hospitals, sick, strict=True)
    ]
    path.write_text("hospital,age,pressure,state\n" + "\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_table_with_an_owners_column_gets_an_answer_in_one_command(fedskew: Any, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    question = ["advise", "--data", "patients.csv?label=state&owner=hospital", "--rounds", "1", "--seeds", "0-2"]
    question += ["--budget", "500", "--no-state", "--sums-only", "--set", "model=mlp:hidden=4", "fedprox"]
    done = fedskew(*question, "--json")
    assert done.code == 0, done.err
    found = done.json()
    assert found["experiment"]["split"] == "natural"
    assert found["profile"]["clients"] == ["<b>north</b>", "south", "west"]
    assert found["goal"] == "personal_balanced"  # classes are not balanced
    assert "between rounds" in found["shortlist"]["excluded"]["local"]
    assert {row["method"].partition(":")[0] for row in found["finals"]} >= {"fedavg", "finetune"}
    page = Path(found["page"]).read_text()
    assert found["sentence"].replace("'", "&#x27;") in page
    assert "<b>north</b>" not in page
    again = fedskew(*question)  # the same question: nothing is run again, the answer is printed
    assert again.code == 0
    assert found["sentence"] in again.out
    assert "note: Not run, as the limits or the goal ask: local." in again.out
    assert f"next: {found['command']}" in again.out
    assert fedskew(*shlex.split(found["command"])[1:]).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goal", "best"], "expected own or global"),
        (["--minutes", "1", "--budget", "5"], "exclude each other"),
        (["--minutes", "-1"], "above 0"),
        (["--max-bytes", "many"], "500kB or 2MB"),
        (["--seeds", "0-1"], "expected 3 or more"),
        (["--data", "nowhere.csv"], "nowhere.csv"),
        (["fedavgg"], "did you mean 'fedavg"),
        (["--split", "natural"], "who made each sample"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, fedskew: Any) -> None:
    done = fedskew("advise", *words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_bytes_are_read_with_their_unit() -> None:
    assert [read_bytes(text) for text in ("1.5 MB", "20kB", "7", None)] == [1_500_000, 20_000, 7, None]
    for text in ("-1", "0", "1.2.3MB", "2 mib"):
        with pytest.raises(UsageError, match="number of bytes"):
            read_bytes(text)
