"""A figure of the user's own is computed from all predictions on the test set, and mistakes are one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FEW = ["--rounds", "2", "--split", "iid:clients=3", "--model", "mlp:hidden=4"]


def test_an_own_figure_is_computed_on_the_test_set_and_can_be_a_goal(fedskew: Any, tmp_path: Path) -> None:
    """The function is accuracy, and its arguments are probabilities of all 360 test samples."""
    (tmp_path / "mine.py").write_text(
        "def right(y_true, scores):\n"
        "    assert scores.shape == (360, 10) and abs(scores.sum(1) - 1).max() < 1e-5\n"
        "    return (scores.argmax(1) == y_true).mean()\n"
    )
    result = fedskew("run", *FEW, "--json", "--metric", "mine.py:right", "--target", "0.01", "--goal", "own").json()
    assert result["metrics"]["own"] == pytest.approx(result["metrics"]["global"]["accuracy"])
    assert result["to_target"]["rounds"] == 1
    assert "mine.py:right 0." in fedskew("run", *FEW, "--metric", "mine.py:right").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mine.py", "expected a Python file and a function in it"),
        ("none.py:right", "there is no file none.py"),
        ("mine.py:wrong", "has no function wrong"),
        ("mine.py:value", "has no function value"),
        ("mine.py:fails", "failed: ZeroDivisionError"),
        ("mine.py:words", "failed: "),
        ("broken.py:right", "broken.py cannot be run: SyntaxError"),
    ],
)
def test_a_mistake_in_an_own_figure_is_one_sentence(fedskew: Any, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(
        "value = 3\ndef fails(y, s):\n    return 1 / 0\ndef words(y, s):\n    return 'good'\n"
    )
    (tmp_path / "broken.py").write_text("def right(:\n")
    done = fedskew("run", *FEW, "--metric", text)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_an_own_figure_needs_a_test_set_and_a_global_model(fedskew: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def right(y, s):\n    return 1.0\n")
    for more in (["--set", "holdout.pool=all"], ["--method", "local"]):
        done = fedskew("run", *FEW, "--metric", "mine.py:right", *more)
        assert done.code == 2
        assert "needs a global model and a test set on the server" in done.err
